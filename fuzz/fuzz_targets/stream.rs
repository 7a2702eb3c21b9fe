//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_stream fuzz/corpus/stream`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::asap_stream::run(data);
});
