"""Tokenizers with a small closed vocabulary, readable by AutoTokenizer and vLLM."""

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(len(SPECIALS))


def word_tokenizer(words: Sequence[str], max_length: int) -> PreTrainedTokenizerFast:
    """One token per word between blanks; decoding joins the words with blanks.

    Ids are `SPECIALS`, then `words` in their order. Raises ValueError when a word occurs twice.
    """
    return _wrap(Tokenizer(_vocabulary(words)), pre_tokenizers.WhitespaceSplit(), max_length)


def character_tokenizer(characters: Sequence[str], max_length: int) -> PreTrainedTokenizerFast:
    """One token per character, blanks included; decoding gives back the very text.

    Ids are `SPECIALS`, then `characters` in their order. Raises ValueError when a character occurs twice.
    """
    tokenizer = Tokenizer(_vocabulary(characters))
    tokenizer.decoder = decoders.Fuse()
    return _wrap(tokenizer, pre_tokenizers.Split(Regex("."), behavior="isolated"), max_length)


def _vocabulary(entries: Sequence[str]) -> models.WordLevel:
    ids = {entry: index for index, entry in enumerate((*SPECIALS, *entries))}
    if len(ids) != len(SPECIALS) + len(entries):
        twice = sorted({entry for entry in entries if entry in SPECIALS or entries.count(entry) > 1})
        raise ValueError(f"vocabulary: each entry must occur once; repeated: {', '.join(twice)}")
    return models.WordLevel(vocab=ids, unk_token=SPECIALS[UNK_ID])


def _wrap(
    tokenizer: Tokenizer, pre_tokenizer: pre_tokenizers.PreTokenizer, max_length: int
) -> PreTrainedTokenizerFast:
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIALS[BOS_ID]} $A", special_tokens=[(SPECIALS[BOS_ID], BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIALS[PAD_ID],
        bos_token=SPECIALS[BOS_ID],
        eos_token=SPECIALS[EOS_ID],
        unk_token=SPECIALS[UNK_ID],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
