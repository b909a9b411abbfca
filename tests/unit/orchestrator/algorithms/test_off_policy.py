"""Off-policy corrections by hand."""

from math import nan
from typing import Any

import pytest
import torch

from orchestrator.algorithms.loss import bound, policy_loss
from orchestrator.algorithms.off_policy import BANDS, correction_weights, measures, segments_of

# Two responses, of three tokens and of one. Ratios of the learner to the engine: 2, 0.25, 1.2; 8.
MASK = torch.tensor([[True, True, True], [True, False, False]])
K = torch.tensor([[2.0, 0.25, 1.2], [8.0, nan, nan]])
ENGINE = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, nan, nan]])
OLD = ENGINE + K.log()
NONE = {"cap": None, "band": None}


def weights(kind: Any, **options: Any) -> list[list[float]]:
    rows: list[list[float]] = correction_weights(
        kind, OLD, ENGINE, MASK, **{"sampled": MASK, "cap": 2.0} | options
    ).tolist()
    return rows


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("tis", {}, [[2, 0.25, 1.2], [2, 1, 1]]),
        ("tis", {"cap": 1.0}, [[1, 0.25, 1], [1, 1, 1]]),
        ("tis", {"cap": None}, [[1, 1, 1], [1, 1, 1]]),
        # 2 * 0.25 * 1.2 = 0.6; 8, truncated.
        ("tis-sequence", {}, [[0.6, 0.6, 0.6], [2, 1, 1]]),
        ("icepop", {}, [[2, 0, 1.2], [0, 1, 1]]),
        ("icepop", {"band": (0.2, 1.5)}, [[0, 0.25, 1.2], [0, 1, 1]]),
        # 0.6 ** (1 / 3) = 0.843; 8.
        ("geometric", {}, [[0, 0, 0], [0, 1, 1]]),
        ("geometric", {"band": (0.8, 1.25)}, [[1, 1, 1], [0, 1, 1]]),
        ("decoupled", {}, [[2, 0.25, 1.2], [0, 1, 1]]),
        ("decoupled", {"cap": None}, [[2, 0.25, 1.2], [8, 1, 1]]),
    ],
)
def test_weights(kind: str, options: dict[str, Any], expected: list[list[float]]) -> None:
    for row, wanted in zip(weights(kind, **options), expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("kind", ["tis", "tis-sequence", "icepop", "geometric", "decoupled"])
@pytest.mark.parametrize("band", [None, (0.8, 1.25)])
def test_responses_that_share_a_row_are_weighed_apart(kind: Any, band: Any) -> None:
    """Packed as learners pack: both responses in one row, their tokens counted from 0."""
    segments = segments_of(torch.tensor([[0, 1, 2, 0]]))
    assert segments.tolist() == [[0, 0, 0, 1]]
    if kind in ("tis", "tis-sequence", "decoupled"):
        band = None
    trained = torch.tensor([[False, True, True], [True, False, False]])
    options: dict[str, Any] = {"cap": 2.0, "band": band}
    packed = correction_weights(
        kind,
        OLD[MASK][None],
        ENGINE[MASK][None],
        trained[MASK][None],
        sampled=torch.ones(1, 4, dtype=torch.bool),
        segments=segments,
        **options,
    )
    steps = segments_of(torch.arange(3)[None])
    padded = correction_weights(kind, OLD, ENGINE, trained, sampled=MASK, segments=steps, **options)
    assert packed[0].tolist() == pytest.approx(padded[MASK].tolist())


@pytest.mark.parametrize(
    ("kind", "band", "expected"),
    [
        # Over all three tokens, 2 * 0.25 * 1.2 = 0.6; its cube root is 0.843. Of the last two alone: 0.3 and 0.548.
        ("tis-sequence", None, 0.6),
        ("geometric", (0.8, 1.25), 1),
    ],
)
def test_tokens_that_are_left_out_belong_to_their_responses_ratio(kind: Any, band: Any, expected: float) -> None:
    trained = torch.tensor([[False, True, True], [False, False, False]])
    first, _ = correction_weights(kind, OLD, ENGINE, trained, sampled=MASK, cap=2.0, band=band)
    assert first[1:].tolist() == pytest.approx([expected] * 2)


@pytest.mark.parametrize("kind", ["tis", "tis-sequence", "icepop", "geometric", "decoupled"])
def test_on_policy_nothing_is_corrected(kind: Any) -> None:
    same = correction_weights(kind, ENGINE, ENGINE, MASK, sampled=MASK, cap=2.0)
    assert same.tolist() == [[1.0] * 3] * 2
    assert measures(kind, ENGINE, ENGINE, MASK, sampled=MASK, cap=2.0, band=None)["corrected"] == 0


def test_double_sided_importance_sampling_and_its_gradient() -> None:
    # r = 2, 0.1 (below the band), 1; 5 (above). A = 1, 1, -3; 2. Over four tokens: -(2 * 1 + 1 * -3) / 4 = 0.25.
    r = torch.tensor([[2.0, 0.1, 1.0], [5.0, nan, nan]])
    new = (torch.where(MASK, ENGINE, 0.0) + torch.where(MASK, r, 1.0).log()).requires_grad_()
    advantages = torch.tensor([[1.0, 1.0, -3.0], [2.0, nan, nan]])
    dis = bound("dis", band=BANDS["dis"])
    actual = policy_loss(new, ENGINE, advantages, MASK, bound=dis, weights=None, denominator=4)
    actual.loss.backward()  # type: ignore[no-untyped-call]
    assert float(actual.loss.detach()) == pytest.approx(0.25)
    # d(r A) / d(log pi) = r A where r is inside the band, and nothing outside.
    assert new.grad is not None
    assert new.grad.tolist() == [pytest.approx([-0.5, 0.0, 0.75]), [0.0, 0.0, 0.0]]
    assert (float(actual.clip_fraction_low), float(actual.clip_fraction_high)) == (0.25, 0.25)
    assert float(actual.dual_clip_fraction) == 0
    assert float(actual.ratio_mean) == pytest.approx(8.1 / 4)
    assert float(actual.ratio_max) == pytest.approx(5)


def test_the_ends_of_the_band_of_dis_are_outside() -> None:
    old = torch.zeros(1, 3)
    mask = torch.ones(1, 3, dtype=torch.bool)
    r = torch.tensor([[0.5, 1.0, 2.0]])
    dis = bound("dis", band=(0.5, 2.0))
    actual = policy_loss(r.log(), old, torch.ones(1, 3), mask, bound=dis, weights=None, denominator=1)
    assert float(actual.loss) == -1
    assert (float(actual.clip_fraction_low), float(actual.clip_fraction_high)) == (1, 1)
    measured = measures("dis", r.log(), old, mask, sampled=mask, cap=None, band=(0.5, 2.0))
    assert measured["corrected"] == pytest.approx(2 / 3)


def test_measures_by_hand() -> None:
    # k: 0.25, 1.2, 2, 8: sum 11.45, squares 69.5025.
    actual = measures("tis", OLD, ENGINE, MASK, sampled=MASK, cap=2.5, band=None)
    assert actual["ess"] == pytest.approx(11.45**2 / (69.5025 * 4), rel=1e-5)
    assert actual["ratio_p50"] == pytest.approx(1.6, rel=1e-5)
    assert actual["ratio_p01"] == pytest.approx(0.25 + 0.03 * 0.95, rel=1e-4)
    assert actual["ratio_p99"] == pytest.approx(2 + 0.97 * 6, rel=1e-4)
    shares = {"tis": 0.25, "tis-sequence": 0.25, "icepop": 0.5, "geometric": 1.0, "decoupled": 0.25, "dis": 0.25}
    for kind, share in shares.items():
        measured = measures(kind, OLD, ENGINE, MASK, sampled=MASK, cap=2.5, band=None)  # type: ignore[arg-type]
        assert measured["corrected"] == share
    for kind in ("tis", "tis-sequence", "decoupled"):  # without a cap
        measured = measures(kind, OLD, ENGINE, MASK, sampled=MASK, cap=None, band=None)  # type: ignore[arg-type]
        assert measured["corrected"] == 0


def test_measures_are_of_the_tokens_that_are_trained_on() -> None:
    """Without the first token, whose ratio of 2 stays a part of its response's product."""
    trained = torch.tensor([[False, True, True], [True, False, False]])
    for kind, share in {"tis": 1 / 3, "tis-sequence": 1 / 3, "icepop": 2 / 3, "geometric": 1.0, "dis": 1 / 3}.items():
        actual = measures(kind, OLD, ENGINE, trained, sampled=MASK, cap=2.5, band=None)  # type: ignore[arg-type]
        assert actual["corrected"] == pytest.approx(share)
        # k: 0.25, 1.2, 8: sum 9.45, squares 65.5025.
        assert actual["ess"] == pytest.approx(9.45**2 / (65.5025 * 3), rel=1e-5)
        assert actual["ratio_p50"] == pytest.approx(1.2, rel=1e-5)
    # Clip dis bounds a response's ratio as the loss takes it, from the trained tokens: (0.25 * 1.2) ** 0.5 = 0.55; 8.
    options: dict[str, Any] = {"cap": None, "band": (0.6, 4.0), "sequence": True}
    assert measures("dis", OLD, ENGINE, trained, sampled=MASK, **options)["corrected"] == 1


@pytest.mark.parametrize("band", [(1.0, 2.0), (0.5, 1.0), (-0.1, 2.0), (0.5, 0.7)])
def test_a_band_holds_one(band: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="band must hold 1, got"):
        correction_weights("icepop", OLD, ENGINE, MASK, sampled=MASK, cap=None, band=band)
