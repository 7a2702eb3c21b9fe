//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_saved_membership fuzz/corpus/saved_membership`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::saved_membership::run(data);
});
