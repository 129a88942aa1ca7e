"""Faults and failures by the hundred, composed from a seed and played for real: who is said to have done it?"""
