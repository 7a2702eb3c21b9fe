//! `cargo +nightly fuzz run --features libfuzzer libfuzzer_enrolment fuzz/corpus/enrolment`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    holdfast_fuzz::enrolment::run(data);
});
