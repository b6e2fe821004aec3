"""Messages that no agent should write and that all of them will."""

GARBAGE = {
    "empty": "",
    "blank": " \n\t ",
    "huge": "x" * 1_000_000,
    "huge number": "9" * 100_000,
    "null bytes": "\x00\x00left\x00",
    "unicode": "→ 左 ｌｅｆｔ ٣ 🧊\u202e",
    "lone surrogate": "\ud800",
    "braces": "{[(" * 5_000,
    "markup": "<think><|im_end|></tool_call>",
    "no number": "nan inf -0 1e999 1_0 ² 0x1",
    "format": "%s %n {} {0.__class__} $HOME",
    "repeated letters": "a" * 64 + "!",
    "repeated words": "left " * 64 + "!",
    "repeated digits": "1" * 64 + "!",
    "many lines": "left\r\n" * 20_000,
    "other types": 'null true [1, "a"] {"action": null}',
}
"""name → message. The repeated ones find regular expressions that take for ever."""
