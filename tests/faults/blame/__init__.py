"""Faults and failures by the hundred, composed from a seed and played for real: whose doing does KubeRoll say it was?"""
