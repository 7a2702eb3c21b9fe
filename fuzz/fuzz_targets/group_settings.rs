//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_group_settings fuzz/corpus/group_settings`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::group_settings::run(data);
});
