//! The smallest program a lab can be built from: it plays the hidden roles (init, enter, link) and nothing else.
//! The crate's own tests name it in [`holdfast_lab::Spec::program`].
#![forbid(unsafe_code)]

fn main() {
    holdfast_lab::init_main();
    eprintln!("holdfast-lab plays hidden roles for a lab; use `holdfast lab`");
    std::process::exit(2);
}
