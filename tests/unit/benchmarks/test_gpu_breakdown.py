"""A step's time by kinds of kernels, from events that are made up and from a step on a CPU."""

import pytest
import torch

from benchmarks.gpu.breakdown import Kernel, breakdown, covered, kind, recorded


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT", "products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_32x1_tn_align8>", "products"),
        (
            "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>",
            "attention",
        ),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3", "attention"),
        ("triton_poi_fused__flash_attention_forward_addmm_clone_3", "elementwise"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "elementwise"),
        ("triton_tem_fused_mm_4", "products"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)"
            "::FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>",
            "optimizer",
        ),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::Tensor)>", "copies"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        (
            "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<float>>",
            "elementwise",
        ),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "elementwise"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("a_kernel_of_somebody", "other"),
        ("aten::addmm", "products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::copy_", "copies"),
        ("aten::mul", "elementwise"),
    ],
)
def test_a_kernel_has_a_kind_by_its_name(name: str, expected: str) -> None:
    assert kind(name) == expected


def test_kernels_that_overlap_count_once_as_busy_and_each_in_its_kind() -> None:
    kernels = [
        Kernel("void at::native::reduce_kernel<1>", 7.0, 8.0),
        Kernel("nvjet_a", 0.0, 2.0),
        Kernel("flash_fwd", 1.0, 3.0),
        Kernel("nvjet_a", 1.5, 1.75),
    ]
    assert covered(kernels) == 4.0
    figures = breakdown(kernels, 10.0)
    assert figures["busy_percent"] == 40.0
    assert {name: took for name, took in figures.items() if name.endswith("_s") and took} == {
        "products_s": 2.25,
        "attention_s": 2.0,
        "elementwise_s": 1.0,
    }
    assert figures["kernels"] == 4
    assert figures["longest"] == "2250.0 ms nvjet_a; 2000.0 ms flash_fwd; 1000.0 ms reduce_kernel<1>"


def test_a_step_that_launches_nothing_is_not_busy() -> None:
    assert breakdown([], 1.0)["busy_percent"] == 0.0


def test_a_profiler_that_sees_nothing_gives_no_figures() -> None:
    with pytest.raises(RuntimeError, match="saw no kernel"):
        recorded(lambda: None, torch.device("cpu"))


def test_a_step_on_a_cpu_gives_its_operations() -> None:
    weight = torch.randn(32, 32, requires_grad=True)

    def step() -> None:
        torch.nn.functional.linear(torch.randn(8, 32), weight).relu().sum().backward()

    kernels = recorded(step, torch.device("cpu"))
    kinds = {kind(kernel.name) for kernel in kernels}
    assert {"products", "elementwise"} <= kinds
    assert all(kernel.ended >= kernel.began for kernel in kernels)
    assert covered(kernels) > 0
