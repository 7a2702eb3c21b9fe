//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_replication fuzz/corpus/replication`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::replication::run(data);
});
