//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_image fuzz/corpus/image`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::image::run(data);
});
