//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_vnet fuzz/corpus/vnet`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::vnet_header::run(data);
});
