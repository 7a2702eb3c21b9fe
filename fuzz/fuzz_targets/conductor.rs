//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_conductor fuzz/corpus/conductor`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::conductor::run(data);
});
