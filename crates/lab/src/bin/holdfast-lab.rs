//! The smallest program from which a lab can be built: it contains only the hidden roles (init, enter, link). The
//! crate's own tests name it in [`holdfast_lab::LabSpec::program`].
#![forbid(unsafe_code)]

fn main() {
    holdfast_lab::run_hidden_role();
    eprintln!("holdfast-lab only runs internal processes of a lab; use `holdfast lab`");
    std::process::exit(2);
}
