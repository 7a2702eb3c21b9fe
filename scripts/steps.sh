# Sourced by ./x: section headings, steps that go on after a failure, and the closing count.
# shellcheck shell=bash

started=$SECONDS
passed=0
failed=0
failed_steps=()
skipped_steps=()
named_tests=()
last_words=()
durations=()
# A step ends with this status when the machine, not the project, keeps it from running.
skip_status=77

# section TEXT: a heading with the time since the start.
section() {
    local seconds=$((SECONDS - started))
    printf '\n== [%2d:%02d] %s\n' $((seconds / 60)) $((seconds % 60)) "$*"
}

# step NAME COMMAND...: runs the command in the checkout, shows its output as it comes, adds up the tests it
# reports, and remembers a failure instead of ending the run.
step() {
    local name=$1 log
    shift
    section "$name"
    log=$(mktemp "${TMPDIR:-/tmp}/holdfast-x.XXXXXX")
    local failed_before=$failed status=0 begun=$SECONDS
    (cd "$root" && "$@") 2>&1 | tee "$log" || status=${PIPESTATUS[0]}
    count_tests "$log"
    local line
    while IFS= read -r line; do
        named_tests+=("$line")
    done < <(grep -aE '^(flaky|skipped test|failed test): ' "$log")
    if ((status == skip_status)); then
        skipped_steps+=("$name")
    elif ((status)); then
        failed_steps+=("$name")
        # A step that broke without a failing test (lints, a crash, a compile error) still counts as a failure.
        ((failed > failed_before)) || failed=$((failed + 1))
        # The summary repeats its last words: whoever sees the end of a long run alone sees why.
        last_words+=("$name:"$'\n'"$(tail -n 12 "$log" | cut -c 1-300 | sed 's/^/    /')")
    fi
    durations+=("$(printf '%5d s  %s' $((SECONDS - begun)) "$name")")
    rm -f "$log"
}

# count_tests LOG: adds every `test result:` line of cargo to the totals.
count_tests() {
    local line pattern='^test result: .* ([0-9]+) passed; ([0-9]+) failed;'
    while IFS= read -r line; do
        [[ $line =~ $pattern ]] || continue
        passed=$((passed + BASH_REMATCH[1]))
        failed=$((failed + BASH_REMATCH[2]))
    done < <(grep -a '^test result: ' "$1")
}

# all_tests: every test but those of `./x test-real`, with captures of programs that speak SCTP; then documentation's examples.
all_tests() {
    local status=0
    need_nextest || return
    cargo xtask test --workspace --config "target.'cfg(unix)'.runner=['$root/scripts/captures.sh', 'run']" || status=$?
    cargo test --locked --workspace --no-fail-fast --doc || status=$?
    return "$status"
}

# long_tests NAME...: the ignored tests of these programs.
long_tests() {
    need_nextest || return
    # The whole workspace, as `./x test` does: what was built for that is used again.
    # shellcheck disable=SC2086 # names have no spaces
    cargo build --locked --workspace --bins ${*/#/--test } || return
    # shellcheck disable=SC2086
    cargo xtask test --workspace ${*/#/--test } --run-ignored only --success-output final
}

# seed_tests SEEDS: the properties and simulations of the crates without IO, with this number of random cases each.
seed_tests() {
    need_nextest || return
    # The whole workspace, as `./x test` does: what was built for that is used again.
    PROPTEST_CASES=$1 HOLDFAST_SEEDS=$1 \
        cargo xtask test --workspace -E 'package(holdfast-wire) | package(holdfast-proto) | package(holdfast-sim)'
}

# fuzz_step SECONDS: every program in fuzz/src/bin, as many at once as there are processors.
fuzz_step() { step "Fuzz, $1 s each" fuzz_all "$1"; }

fuzz_all() {
    local of=(--quiet --locked --manifest-path fuzz/Cargo.toml) failures status=0
    cargo build "${of[@]}" --bins || return
    failures=$(mktemp -d)
    # What a program says comes in one piece, and what failed stands at the end as well.
    # shellcheck disable=SC2016 # expanded by the shell that runs it
    basename --multiple --suffix .rs fuzz/src/bin/*.rs |
        xargs --max-procs "$(nproc)" --replace=NAME bash -c \
            'said=$(cargo run "${@:3}" --bin NAME -- --seconds "$1" 2>&1); status=$?
             echo "$said"; ((status == 0)) || printf "NAME fails:\n%s\n" "$said" >"$2/NAME"; exit $status' \
            fuzz "$1" "$failures" "${of[@]}" || status=$?
    find "$failures" -type f -exec cat {} +
    rm -r "$failures"
    return "$status"
}

# summary: what failed, then the line that CI reads; its status is the run's.
summary() {
    section "Summary"
    local name
    printf '%s\n' "${durations[@]}"
    printf '%s\n' "${last_words[@]+"${last_words[@]}"}" | sed '/^$/d'
    for name in "${skipped_steps[@]+"${skipped_steps[@]}"}"; do
        printf 'skipped: %s\n' "$name"
    done
    printf '%s\n' "${named_tests[@]+"${named_tests[@]}"}" | sed '/^$/d'
    for name in "${failed_steps[@]+"${failed_steps[@]}"}"; do
        printf 'failed: %s\n' "$name"
    done
    printf '%d passed, %d failed\n' "$passed" "$failed"
    ((failed == 0))
}
