//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_enrp fuzz/corpus/enrp`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::rserpool::enrp(data);
});
