"""A cache of models: a directory of a node, or a claim, that all engines there load models from.

`hub` and `bucket` say which files a model has and fetch them, `store` keeps them: each fetched once, whole or not at
all, and the least recently used removed when there is no room.
"""
