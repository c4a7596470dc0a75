"""Which tokens of a vocabulary are special, and an engine that reads no text as one of them."""

import json
import re

import tokenizers
from tokenizers import models, pre_tokenizers

USUAL_NAMES = {
    "pad_token": ("<pad>", "[PAD]"),
    "start_token": ("<s>", "<bos>", "[CLS]"),
    "end_token": ("</s>", "<eos>", "[SEP]"),
    "unk_token": ("<unk>", "[UNK]"),
}
"""What the token of each role is called where nobody names it, the first one found counting."""


def checked_roles(special_tokens: object) -> dict[str, str]:
    """The names that were saved with a tokenizer, if they are names of roles that there are."""
    if (
        not isinstance(special_tokens, dict)
        or not special_tokens.keys() <= USUAL_NAMES.keys()
        or not all(isinstance(name, str) for name in special_tokens.values())
    ):
        expected = ", ".join(USUAL_NAMES)
        raise ValueError(f"expected special_tokens to name some of {expected}, got {special_tokens!r:.80}")
    return special_tokens


def find_name(vocab: dict[str, int], role: str, given: str | None) -> str | None:
    """The special token of a role: the given one, which must exist, or the first usual name in the vocabulary."""
    if given is not None and given not in vocab:
        raise ValueError(f"expected {role} to be in the vocabulary, got {given!r}")
    return given or next((name for name in USUAL_NAMES[role] if name in vocab), None)


def required_name(names: dict[str, str | None], role: str) -> str:
    """The name that was found for a role that no tokenizer can do without."""
    name = names[role]
    if name is None:
        tried = ", ".join(USUAL_NAMES[role])
        raise ValueError(f"expected a {role} in the vocabulary, found none of {tried}; name it with {role}=")
    return name


def prepared_engine(text: str, names: set[str]) -> tuple[tokenizers.Tokenizer, set[str]]:
    """The engine that encodes and decodes, and all its special tokens: `names` and those the file marks."""
    data = json.loads(text)
    data.update(truncation=None, padding=None, post_processor=None)
    if data["model"].get("dropout"):
        data["model"]["dropout"] = None  # BPE dropout makes ids a matter of chance
    for token in data["added_tokens"]:
        token["special"] = token["special"] or token["content"] in names
    special = names | {token["content"] for token in data["added_tokens"] if token["special"]}
    engine = tokenizers.Tokenizer.from_str(json.dumps(data, ensure_ascii=False))
    engine.encode_special_tokens = True  # that is: added tokens that are special are not looked for in the text
    if not isinstance(engine.model, models.WordLevel):
        # A unigram model still finds a special token among its pieces. Its text is cut after the first character, by
        # the last of the pre-tokenizers, so that no model sees it whole. (A word is not cut: it becomes unknown.)
        by_first: dict[str, list[str]] = {}
        for name in sorted(special):
            if len(name) > 1:
                by_first.setdefault(name[0], []).append(re.escape(name[1:]))
        cut = "|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in by_first.items())
        steps = [engine.pre_tokenizer, pre_tokenizers.Split(tokenizers.Regex(cut), "isolated")] if cut else []
        if steps:
            engine.pre_tokenizer = pre_tokenizers.Sequence([step for step in steps if step is not None])
    return engine, special
