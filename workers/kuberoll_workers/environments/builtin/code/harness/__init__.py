"""Programs that run confined: the checker, which has the tests, and the process that has the policy's code.

They are handed to the runner as text, `values` before each of the others, and import nothing of KubeRoll.
"""
