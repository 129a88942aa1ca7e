#!/bin/sh
# After the agent; no command of it ever sees this file.
printf '10\n\n-4\n\n-1\n' > /tests/numbers
if [ "$(/work/sums.sh numbers.txt)" = 2 ] && [ "$(/work/sums.sh /tests/numbers)" = 5 ]; then
    reward=1
else
    reward=0
fi
# The program of the agent may have written rewards of its own.
rm -rf /logs/verifier/*
echo "$reward" > /logs/verifier/reward.txt
