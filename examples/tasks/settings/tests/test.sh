#!/bin/sh
# A part for what is in it, and a part for who may read it.
reward=0
if [ "$(cat /work/service.conf)" = "$(cat /tests/service.conf)" ]; then
    reward=0.5
    [ "$(stat -c %a /work/service.conf)" = 600 ] && reward=1
fi
echo $reward > /logs/verifier/reward.txt
