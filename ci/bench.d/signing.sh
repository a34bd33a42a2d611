# shellcheck shell=bash
# shellcheck disable=SC2154 # ci/bench's variables
# The row about module signing. Sourced by ci/bench.

signing_rows() {
    need_packages openssl
    say "signing 40 modules of 1 MiB with RSA-4096"
    rust_bench signing "$state/times/signing"
    row "signing of 40 modules" "$(median signing)" 500 ms
}
