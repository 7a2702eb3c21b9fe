//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_pool fuzz/corpus/pool`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::pool_messages::run(data);
});
