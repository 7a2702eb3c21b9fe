//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_registrar fuzz/corpus/registrar`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::registrar::run(data);
});
