#!/bin/sh
# After the agent; no command of it ever sees this file.
printf '10\n\n-4\n\n-1\n' > /tests/numbers
if [ "$(/work/sums.sh numbers.txt)" = 2 ] && [ "$(/work/sums.sh /tests/numbers)" = 5 ]; then
    echo 1
else
    echo 0
fi > /logs/verifier/reward.txt
