//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_packet fuzz/corpus/packet`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::packet::run(data);
});
