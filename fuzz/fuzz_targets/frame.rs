//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_frame fuzz/corpus/frame`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::frame::run(data);
});
