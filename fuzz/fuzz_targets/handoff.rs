//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_handoff fuzz/corpus/handoff`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::handoff::run(data);
});
