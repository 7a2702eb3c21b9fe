//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_membership fuzz/corpus/membership`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::membership::run(data);
});
