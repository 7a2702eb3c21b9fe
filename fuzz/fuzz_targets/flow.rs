//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_flow fuzz/corpus/flow`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::flow::run(data);
});
