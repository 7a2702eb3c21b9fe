//! Standard output, whose reader may close it at any time (`| head`).

use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::process::exit;

use anyhow::{Context, Result};
use serde::Serialize;

/// Writes formatted text to standard output; see [`write_stdout`].
macro_rules! output {
    ($($argument:tt)*) => {
        $crate::output::write_stdout(::std::format_args!($($argument)*))
    };
}

/// Writes a formatted line to standard output; see [`write_stdout`].
macro_rules! output_line {
    () => {
        $crate::output::write_stdout(::std::format_args!("\n"))
    };
    ($($argument:tt)*) => {
        $crate::output::write_stdout(::std::format_args!("{}\n", ::std::format_args!($($argument)*)))
    };
}

pub(crate) use {output, output_line};

/// Writes to standard output. Ends the process if that is impossible: quietly if the reader has closed its end, else with
/// an error.
pub fn write_stdout(text: fmt::Arguments<'_>) {
    let mut stdout = io::stdout().lock();
    match stdout.write_fmt(text).and_then(|()| stdout.flush()) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::BrokenPipe => exit(0),
        Err(error) => {
            eprintln!("holdfast: cannot write the output: {error}");
            exit(1);
        }
    }
}

/// Prints a value as JSON.
///
/// # Errors
/// The value has no JSON form.
pub fn print_json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).context("encode the answer")?;
    output_line!("{text}");
    Ok(())
}
