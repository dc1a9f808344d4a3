"""
Byte-level tokenizers for the tiny models. TRL's tests name token ids of Qwen's vocabularies, so those ids must decode
to the text that the tests expect; every other id decodes to a word of its own, of varying length, so that rewards
vary.
"""

import re

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


QWEN_SPECIALS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
).split()
# In Qwen's vocabulary these follow the special tokens and stay in the decoded text.
QWEN_MARKUP = [
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
QWEN_FIRST_SPECIAL = 151643
QWEN_WORDS = {
    314: " {",
    330: ' "',
    397: ">\n",
    411: "out",
    450: "de",
    497: '",',
    522: "</",
    606: "name",
    788: '":',
    894: " any",
    927: "sh",
    944: "'t",
    1318: "text",
    1414: " know",
    1513: " don",
    2765: " won",
    4913: '{"',
    5212: ' {"',
    5392: " tool",
    6023: "hi",
    6659: "call",
    7692: "async",
    9520: "step",
    11248: "}}\n",
    13477: "crement",
    14172: "tool",
    16252: " increment",
    16370: "arguments",
    17453: "Done",
    22785: "_tool",
    293: " b",
    35744: "increment",
    64648: "multiply",
    93054: "_multiply",
    95642: '"}}\n',
}
QWEN3_5_WORDS = {
    510: "</",
    866: " any",
    914: "'t",
    1366: " know",
    1459: " don",
    1628: "function",
    5224: " tool",
    13744: "=screen",
    16936: "Done",
    22076: "_tool",
    30091: "shot",
}
QWEN3_5_FIRST_SPECIAL = 248044
FIRST_CORPUS_ID = 1024
# Enough for the words of the prompts; tests that name no ids run ten times faster than with 151,643.
SHORT_SIZE = 4096


def byte_symbols() -> dict[int, str]:
    """Byte -> symbol of a byte-level vocabulary, in the order in which GPT-2 and Qwen number them (ids 0 to 255)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + index) for index, byte in enumerate(others)}}


def filler(index: int) -> str:
    """Text that no other index and no word has: letters A to W count, a tail of zeros varies the length."""
    letters, rest = "", index
    while True:
        letters = chr(ord("A") + rest % 23) + letters
        rest //= 23
        if rest == 0:
            return letters + "0" * (1 + index % 6)


def byte_level_tokenizer(
    words: dict[int, str], specials: dict[int, str], markup: dict[int, str], corpus: str = "", **named
):
    """
    Builds a tokenizer whose ids are 0 to the largest one given.

    Args:
        words (`dict[int, str]`): ids whose text is fixed.
        specials (`dict[int, str]`): special tokens, skipped when decoding without them.
        markup (`dict[int, str]`): added tokens that stay in the decoded text.
        corpus (`str`): its words get an id each, so that prompts are short; other words are spelled in bytes.
        named: `eos_token` and the like, passed on to `PreTrainedTokenizerFast`.
    """
    symbols = byte_symbols()
    text_of = {index: "".join(symbols[byte] for byte in word.encode()) for index, word in words.items()}
    text_of.update(enumerate(symbols.values()))
    text_of.update({**specials, **markup})
    size = max(text_of) + 1
    known = set(text_of.values())
    frequent = iter(
        sorted({word.replace(" ", symbols[ord(" ")]) for word in re.findall(" ?[A-Za-z]+", corpus)} - known)
    )
    for index in range(FIRST_CORPUS_ID, size):
        if index not in text_of:
            text_of[index] = next(frequent, None) or symbols[ord(" ")] + filler(index)
    vocab = {text_of.get(index) or symbols[ord(" ")] + filler(index): index for index in range(size)}
    if len(vocab) != size:
        raise ValueError(f"{size - len(vocab)} ids of the vocabulary share their text with another id.")
    core = Tokenizer(models.BPE(vocab, [], ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([specials[index] for index in sorted(specials)])
    core.add_tokens([markup[index] for index in sorted(markup)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **named)
    if len(tokenizer) != size:
        raise ValueError(
            f"The tokenizer has {len(tokenizer)} ids instead of {size}: a named token is not in `specials`."
        )
    return tokenizer


def numbered(tokens: list[str], first: int) -> dict[int, str]:
    return {first + index: token for index, token in enumerate(tokens)}


def qwen_tokenizer(corpus: str, words: dict[int, str], first_special: int):
    """
    A tokenizer with Qwen's special tokens.

    Args:
        corpus (`str`): text whose words get an id each.
        words (`dict[int, str]`): ids whose text is fixed, `QWEN_WORDS` or `QWEN3_5_WORDS`.
        first_special (`int`): id of the first special token, the size of the vocabulary before them.
    """
    return byte_level_tokenizer(
        {index: word for index, word in words.items() if index < first_special},
        numbered(QWEN_SPECIALS, first_special),
        numbered(QWEN_MARKUP, first_special + len(QWEN_SPECIALS)),
        corpus,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )


def family_tokenizer(template: str, corpus: str, extra: list[str], pad: str | None, size: int = SHORT_SIZE, **named):
    """For families whose ids no test names: bytes, words, and every `<|...|>` token of the chat template."""
    found = sorted(set(re.findall(r"<\|?[A-Za-z_0-9]+\|?>", template)) - {"<think>", "</think>"})
    specials = list(dict.fromkeys(["<unk>", "<s>", "</s>", *extra, *([pad] if pad else []), *found]))
    return byte_level_tokenizer(
        {},
        numbered(specials, size),
        {},
        corpus,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token=pad,
        **named,
    )
