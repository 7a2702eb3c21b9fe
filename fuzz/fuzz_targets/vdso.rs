//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_vdso fuzz/corpus/vdso`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::vdso::run(data);
});
