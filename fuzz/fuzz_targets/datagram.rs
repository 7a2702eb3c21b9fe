//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_datagram fuzz/corpus/datagram`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::datagram::run(data);
});
