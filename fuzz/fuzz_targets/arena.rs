//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_arena fuzz/corpus/arena`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::arena::run(data);
});
