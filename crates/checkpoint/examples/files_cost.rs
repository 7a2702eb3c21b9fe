//! What saving and restoring the descriptors of a process costs: `files_cost KIND NUMBER`, with the kinds `tcp`, `event`,
//! `pipe`, `file` and `pair`. Times are the processor's.

use holdfast_checkpoint::files::{FdStore, FilesSnapshot, ProvidedFiles, SaveLimits};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use std::os::fd::{AsFd, IntoRawFd, OwnedFd};
use std::time::Duration;

fn main() {
    let mut words = std::env::args().skip(1);
    let kind = words.next().unwrap_or("tcp".into());
    let number: usize = words
        .next()
        .and_then(|word| word.parse().ok())
        .unwrap_or(10_000);
    FdStore::raise_limit().expect("limit");
    // SAFETY: the program has one thread.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        hold_descriptors(&kind, number);
    }
    let donor = Pid::from_raw(pid).expect("a child");
    waitpid(Some(donor), WaitOptions::UNTRACED).expect("stopped");
    measure_save_and_restore(&kind, number, pid);
    kill_process(donor, Signal::KILL).expect("killed");
}

fn measure_save_and_restore(kind: &str, number: usize, pid: i32) {
    let started = cpu_time();
    let snapshot = FilesSnapshot::save(&[pid], &SaveLimits::default()).expect("saved");
    let before = cpu_time() - started;
    let started = cpu_time();
    let frozen = snapshot.save_frozen(&[pid]).expect("saved");
    let in_freeze = cpu_time() - started;
    let changes = frozen.changes;
    let image = postcard::to_stdvec(&snapshot.image).expect("coded").len();
    let bytes = postcard::to_stdvec(&changes).expect("coded").len();
    println!(
        "{kind} {number}: before the freeze {before:?} and {image} bytes; in the freeze {in_freeze:?}, \
         {bytes} bytes"
    );
    let sockets: Vec<_> = frozen.sockets.into_iter().collect();
    let given = ProvidedFiles {
        sockets: sockets.into_iter().collect(),
        ..ProvidedFiles::default()
    };
    // SAFETY: the program has one thread.
    let acceptor = unsafe { libc::fork() };
    if acceptor == 0 {
        measure_restore(snapshot.image, changes, given);
    }
    waitpid(Pid::from_raw(acceptor), WaitOptions::empty()).expect("ended");
}

fn measure_restore(
    image: holdfast_checkpoint::files::FilesImage,
    changes: holdfast_checkpoint::files::FilesImageChanges,
    given: ProvidedFiles,
) -> ! {
    // The donor's own copies stand for restored sockets; making those is not measured here. Output goes where the tree's
    // descriptors are not.
    let out = std::io::stdout().as_fd().try_clone_to_owned();
    let out = FdStore::move_caller_fd_up(out.expect("dup")).expect("lifted");
    let started = cpu_time();
    let mut stock = FdStore::prepare(image, ProvidedFiles::default()).expect("prepared");
    let prepared = cpu_time() - started;
    let started = cpu_time();
    stock.apply_final(changes, given).expect("finished");
    let finished = cpu_time() - started;
    let started = cpu_time();
    let table = *stock.image().tables.keys().next().expect("a table");
    let steps = stock.table_steps(table).expect("arranged").len();
    let text = format!(
        "  acceptor: before the freeze {prepared:?}; in it {finished:?}, and {steps} steps planned in {:?}\n",
        cpu_time() - started
    );
    rustix::io::write(&out, text.as_bytes()).expect("written");
    std::process::exit(0);
}

/// Processor time of this process.
fn cpu_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn hold_descriptors(kind: &str, number: usize) -> ! {
    // SAFETY: no pointers are passed, and nothing that was inherited is used here.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::syscall(libc::SYS_close_range, 0, u32::MAX, 0);
    }
    let mut all: Vec<OwnedFd> = Vec::new();
    while all.len() < number {
        match kind {
            "tcp" => all.push(socket()),
            "event" => all.push(
                rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).expect("made"),
            ),
            "file" => all.push(std::fs::File::open("/proc/self/exe").expect("open").into()),
            "pair" => {
                let (one, other) = std::os::unix::net::UnixStream::pair().expect("pair");
                all.extend([one.into(), other.into()]);
            }
            _ => {
                let (one, other) = std::io::pipe().expect("pipe");
                all.extend([one.into(), other.into()]);
            }
        }
    }
    for fd in all {
        let _ = fd.into_raw_fd();
    }
    kill_process(rustix::process::getpid(), Signal::STOP).expect("stopped");
    std::process::exit(0)
}

fn socket() -> OwnedFd {
    use rustix::net::{AddressFamily, SocketType};
    rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).expect("socket")
}
