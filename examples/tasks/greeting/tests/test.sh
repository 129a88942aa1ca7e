#!/bin/sh
reward=1

# What the script writes for these arguments must be this.
check() {
    expected=$1
    shift
    [ "$(sh /work/greet.sh "$@")" = "$expected" ] || reward=0
}

check "$(printf 'Hello, Ada!\nHello, Edsger!')" Ada Edsger
check "$(printf 'Hello, Grace Hopper!\nHello, Jean  Bartik!')" "Grace Hopper" "Jean  Bartik"
check "Hello, nobody!"
echo $reward > /logs/verifier/reward.txt
