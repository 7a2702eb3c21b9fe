//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_app fuzz/corpus/app`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::program_messages::run(data);
});
