"""Is a script bitwise elastic? EasyScale's bitwise profiler (section 4) as a tool.

Everything here reads records and compares text; nothing imports torch. `experiment` decides which runs to make,
`records` reads what they left, `compare` finds the first difference, `dependence` and `causes` reason about it,
`suspects` reads the script, and `answer` says it all in words.
"""
