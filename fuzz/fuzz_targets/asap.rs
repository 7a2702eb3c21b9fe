//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_asap fuzz/corpus/asap`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::rserpool::asap(data);
});
