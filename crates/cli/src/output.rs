//! Standard output, whose reader may close it at any time (`| head`).

use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::process::exit;
use std::sync::atomic::{AtomicBool, Ordering};

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

/// True once the reader has closed its end.
static IS_CLOSED: AtomicBool = AtomicBool::new(false);

/// Returns true once the reader of standard output has closed its end: a command without another purpose may end.
pub fn is_closed() -> bool {
    IS_CLOSED.load(Ordering::Relaxed)
}

/// Writes to standard output. Output that nobody reads any more is dropped, so that the command still ends with its own
/// exit code. Ends the process with an error if writing is impossible for another reason, such as a full disk.
pub fn write_stdout(text: fmt::Arguments<'_>) {
    if is_closed() {
        return;
    }
    let mut stdout = io::stdout().lock();
    match stdout.write_fmt(text).and_then(|()| stdout.flush()) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::BrokenPipe => {
            IS_CLOSED.store(true, Ordering::Relaxed);
        }
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
