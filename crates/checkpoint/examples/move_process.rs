//! Moves a running process without a daemon: a program counts and writes each number to a file. While it counts, its
//! memory is copied; then it is stopped for some milliseconds, and its copy counts on in other namespaces.
//!
//! `cargo build -p holdfast-checkpoint --bins --examples`, then `cargo run -p holdfast-checkpoint --example
//! move_process` (root). The library's restorer must be beside the examples' folder.

use holdfast_checkpoint::acceptor::{ClockOffsets, Restorer};
use holdfast_checkpoint::donor::TreeTracker;
use holdfast_checkpoint::file_rights::FileRights;
use holdfast_checkpoint::image::DescriptorUpdate;
use holdfast_checkpoint::sockets::RestoredSockets;
use holdfast_tcp_repair::WindowProbe;
use std::error::Error;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The program counts up to this number.
const LAST_NUMBER: u32 = 60;
const COUNTING_INTERVAL: Duration = Duration::from_millis(20);
/// Bytes of memory that are copied at a time.
const COPY_BYTES: u64 = 1 << 20;
/// Longest wait for the copy to finish.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn Error>> {
    if let Some(file) = std::env::args().nth(1) {
        return count(Path::new(&file));
    }
    let folder = std::env::temp_dir().join(format!("move_process.{}", std::process::id()));
    std::fs::create_dir(&folder)?;
    let moved = move_counter(&folder.join("numbers"));
    std::fs::remove_dir_all(&folder)?;
    moved
}

/// Writes a number to a file at a time, as the program that is moved.
fn count(path: &Path) -> Result<(), Box<dyn Error>> {
    // Pipes to processes that stay, such as cargo's, cannot move.
    // SAFETY: nothing in this process uses these descriptors.
    unsafe { libc::close_range(3, u32::MAX, 0) };
    let mut file = std::fs::File::create_new(path)?;
    for number in 1..=LAST_NUMBER {
        writeln!(file, "{number}")?;
        std::thread::sleep(COUNTING_INTERVAL);
    }
    Ok(())
}

/// Starts the program, moves it while it counts, and checks that it counted on.
fn move_counter(path: &Path) -> Result<(), Box<dyn Error>> {
    let mut original = Command::new(std::env::current_exe()?)
        .arg(path)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    while numbers(path).len() < 5 {
        std::thread::sleep(COUNTING_INTERVAL);
    }
    let mut copy = match move_process(&mut original) {
        Ok(copy) => copy,
        Err(error) => {
            original.kill()?;
            original.wait()?;
            return Err(error);
        }
    };
    let at_move = numbers(path).len();
    let status = copy.wait_for_end(WAIT_LIMIT)?;
    let counted = numbers(path);
    println!(
        "counted to {at_move} before the move and to {} after it",
        counted.len()
    );
    if status != 0 || counted != (1..=LAST_NUMBER).collect::<Vec<_>>() {
        return Err(format!("status {status}, numbers {counted:?}").into());
    }
    Ok(())
}

fn numbers(path: &Path) -> Vec<u32> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

/// Moves a child of this process to a restorer, which is returned. After an error before the release, the original
/// counts on.
fn move_process(original: &mut Child) -> Result<Restorer, Box<dyn Error>> {
    let mut acceptor = Acceptor::start()?;
    let mut tracker = TreeTracker::start(original.id() as i32)?;
    for _ in 0..2 {
        // While the process runs: everything in the first round, what has changed in the second.
        let mut round = tracker.next_round()?;
        acceptor.restorer.update_tree(&round.tree)?;
        while let Some(pages) = tracker.read_pages(&mut round, COPY_BYTES)? {
            acceptor.restorer.write_pages(pages)?;
        }
        let descriptors = tracker.read_descriptors()?;
        acceptor.restore_descriptors(&descriptors, false)?;
    }
    let frozen_at = Instant::now();
    let mut stopped = tracker.freeze().map_err(|failure| failure.error)?;
    let descriptors = stopped.read_descriptors()?;
    acceptor.restorer.update_tree(stopped.tree())?;
    while let Some(pages) = stopped.read_pages(COPY_BYTES)? {
        acceptor.restorer.write_pages(pages)?;
    }
    acceptor.restore_descriptors(&descriptors, true)?;
    let state = stopped.read_state()?;
    acceptor.restorer.restore_state(&state)?;
    acceptor.restorer.compare_digest(&stopped.digest(&state)?)?;
    // Until here, the original can go on. From here on, only the copy can.
    stopped.release()?;
    original.wait()?;
    acceptor.sockets.activate(WindowProbe::Always, 1)?;
    acceptor.restorer.resume()?;
    println!("stopped for {:?}", frozen_at.elapsed());
    Ok(acceptor.restorer)
}

/// The receiving side.
struct Acceptor {
    restorer: Restorer,
    sockets: RestoredSockets,
}

impl Acceptor {
    fn start() -> Result<Self, Box<dyn Error>> {
        let example = std::env::current_exe()?;
        let build_folder = example.parent().and_then(Path::parent).ok_or("no folder")?;
        let program = build_folder.join("holdfast-restorer");
        let mut restorer = Restorer::start(&program, &[], ClockOffsets::default())?;
        restorer.set_rights(&FileRights::Root)?;
        Ok(Self {
            restorer,
            sockets: RestoredSockets::new(1)?,
        })
    }

    fn restore_descriptors(
        &mut self,
        update: &DescriptorUpdate,
        is_last: bool,
    ) -> Result<(), Box<dyn Error>> {
        self.sockets.prepare(&update.sockets, &update.removed)?;
        let new_sockets = self.sockets.new_sockets();
        if is_last {
            self.restorer.finish_descriptors(update, &new_sockets)?;
        } else {
            self.restorer.update_descriptors(update, &new_sockets)?;
        }
        self.sockets.mark_handed_over();
        Ok(())
    }
}
