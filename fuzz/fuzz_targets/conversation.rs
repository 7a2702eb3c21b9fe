//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_conversation fuzz/corpus/conversation`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::migration_messages::run(data);
});
