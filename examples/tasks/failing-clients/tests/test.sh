#!/bin/sh
if [ "$(cat /work/failing.txt)" = "$(cat /tests/failing.txt)" ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
