//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_state fuzz/corpus/state`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::socket_state::run(data);
});
