//! Runs a target for some time, without an installed fuzzer.

use crate::mutate::{Rng, mutate};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Largest number of inputs kept for mutation; a further input replaces another.
const POOL_MAX: usize = 4_096;

struct Options {
    seconds: u64,
    seed: u64,
    input: Option<PathBuf>,
}

/// Runs the target `name` with the options of the command line: `--seconds N` (10), `--seed N` (from the clock),
/// `--input FILE` (only this input).
pub fn main(name: &str, target: fn(&[u8]) -> bool) -> ExitCode {
    let options = match parse_options() {
        Ok(options) => options,
        Err(problem) => {
            eprintln!("{name}: {problem}; use --seconds N, --seed N or --input FILE");
            return ExitCode::from(2);
        }
    };
    match run_inputs(name, target, &options) {
        Ok(summary) => {
            println!("{name}: {summary}");
            ExitCode::SUCCESS
        }
        Err(problem) => {
            eprintln!("{name}: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn parse_options() -> Result<Options, String> {
    let clock = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let mut options = Options {
        seconds: 10,
        seed: clock.as_nanos() as u64,
        input: None,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(flag) = arguments.next() {
        let value = arguments.next().ok_or(format!("{flag} needs a value"))?;
        let number = || {
            value
                .parse()
                .map_err(|_| format!("{value} is not a number"))
        };
        match flag.as_str() {
            "--seconds" => options.seconds = number()?,
            "--seed" => options.seed = number()?,
            "--input" => options.input = Some(value.into()),
            _ => return Err(format!("there is no {flag}")),
        }
    }
    Ok(options)
}

fn run_inputs(name: &str, target: fn(&[u8]) -> bool, options: &Options) -> Result<String, String> {
    if let Some(path) = &options.input {
        let data = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
        return Ok(format!("accepted: {}", target(&data)));
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut pool = read_corpus(&root.join("corpus").join(name))?;
    let mut rng = Rng(options.seed);
    let end = Instant::now() + Duration::from_secs(options.seconds);
    let (mut runs, mut accepted) = (0_u64, 0_u64);
    let mut run = |data: &[u8]| {
        runs += 1;
        let result = catch_unwind(AssertUnwindSafe(|| target(data)));
        let is_accepted = result.map_err(|_| save_failure(root, name, options.seed, data))?;
        accepted += u64::from(is_accepted);
        Ok::<bool, String>(is_accepted)
    };
    let mut is_corpus_accepted = false;
    for data in &pool {
        is_corpus_accepted |= run(data)?;
    }
    if !is_corpus_accepted {
        return Err("no file of the corpus is accepted; write it anew: cargo run --manifest-path fuzz/Cargo.toml --example make_corpus".to_owned());
    }
    while Instant::now() < end {
        for _ in 0..64 {
            let data = next_input(&pool, &mut rng);
            if run(&data)? {
                add_to_pool(&mut pool, data, &mut rng);
            }
        }
    }
    Ok(format!(
        "{runs} inputs, {accepted} accepted, seed {}",
        options.seed
    ))
}

fn read_corpus(folder: &Path) -> Result<Vec<Vec<u8>>, String> {
    let error_text = |error| format!("{}: {error}", folder.display());
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(error_text)? {
        paths.push(entry.map_err(error_text)?.path());
    }
    paths.sort();
    let files = paths.iter().map(std::fs::read);
    let files = files.collect::<Result<Vec<_>, _>>().map_err(error_text)?;
    if files.is_empty() {
        return Err(format!("{} is empty", folder.display()));
    }
    Ok(files)
}

fn next_input(pool: &[Vec<u8>], rng: &mut Rng) -> Vec<u8> {
    if rng.below(50) == 0 {
        let length = rng.below(300);
        return (0..length).map(|_| rng.next() as u8).collect();
    }
    let mut data = pool[rng.below(pool.len())].clone();
    let other = &pool[rng.below(pool.len())];
    mutate(&mut data, other, rng);
    data
}

fn add_to_pool(pool: &mut Vec<Vec<u8>>, data: Vec<u8>, rng: &mut Rng) {
    if pool.len() < POOL_MAX {
        pool.push(data);
    } else if rng.below(16) == 0 {
        let at = rng.below(pool.len());
        pool[at] = data;
    }
}

fn save_failure(root: &Path, name: &str, seed: u64, data: &[u8]) -> String {
    let folder = root.join("artifacts").join(name);
    let path = folder.join(format!("{seed}"));
    let written = std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(&path, data));
    match written {
        Ok(()) => format!(
            "an input failed, seed {seed}; run it again with --input {}",
            path.display()
        ),
        Err(error) => {
            format!("an input failed, seed {seed}, and could not be kept ({error}): {data:?}")
        }
    }
}
