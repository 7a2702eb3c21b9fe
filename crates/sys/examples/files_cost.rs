//! What saving and restoring the descriptors of a process costs: `files_cost KIND NUMBER`, with the kinds `tcp`, `event`,
//! `pipe`, `file` and `pair`. Times are the processor's.

use holdfast_sys::process::files::{Draft, Given, Limits, Stock};
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
    Stock::raise_limit().expect("limit");
    // SAFETY: the program has one thread.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        hold(&kind, number);
    }
    let donor = Pid::from_raw(pid).expect("a child");
    waitpid(Some(donor), WaitOptions::UNTRACED).expect("stopped");
    measure(&kind, number, pid);
    kill_process(donor, Signal::KILL).expect("killed");
}

fn measure(kind: &str, number: usize, pid: i32) {
    let started = cpu();
    let draft = Draft::save(&[pid], &Limits::default()).expect("saved");
    let before = cpu() - started;
    let started = cpu();
    let frozen = draft.save_frozen(&[pid]).expect("saved");
    let in_freeze = cpu() - started;
    let changes = frozen.changes;
    let image = postcard::to_stdvec(&draft.image).expect("coded").len();
    let bytes = postcard::to_stdvec(&changes).expect("coded").len();
    println!(
        "{kind} {number}: before the freeze {before:?} and {image} bytes; in the freeze {in_freeze:?}, \
         {bytes} bytes"
    );
    let sockets: Vec<_> = frozen.sockets.into_iter().collect();
    let given = Given {
        sockets: sockets.into_iter().collect(),
        ..Given::default()
    };
    // SAFETY: the program has one thread.
    let acceptor = unsafe { libc::fork() };
    if acceptor == 0 {
        restore(draft.image, changes, given);
    }
    waitpid(Pid::from_raw(acceptor), WaitOptions::empty()).expect("ended");
}

fn restore(
    image: holdfast_sys::process::files::Image,
    changes: holdfast_sys::process::files::Changes,
    given: Given,
) -> ! {
    // The donor's own copies stand for restored sockets; making those is not measured here. Output goes where the tree's
    // descriptors are not.
    let out = std::io::stdout().as_fd().try_clone_to_owned();
    let out = Stock::lift_own(out.expect("dup")).expect("lifted");
    let started = cpu();
    let mut stock = Stock::prepare(image, Given::default()).expect("prepared");
    let prepared = cpu() - started;
    let started = cpu();
    stock.finish(changes, given).expect("finished");
    let finished = cpu() - started;
    let started = cpu();
    let table = *stock.image().tables.keys().next().expect("a table");
    let steps = stock.arrangement(table).expect("arranged").len();
    let text = format!(
        "  acceptor: before the freeze {prepared:?}; in it {finished:?}, and {steps} steps planned in {:?}\n",
        cpu() - started
    );
    rustix::io::write(&out, text.as_bytes()).expect("written");
    std::process::exit(0);
}

/// Processor time of this process.
fn cpu() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn hold(kind: &str, number: usize) -> ! {
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
