//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_dns fuzz/corpus/dns`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::dns::run(data);
});
