//! A compromised donor offers an ordinary user's processes and sends messages that no honest donor sends. The acceptor
//! refuses each with its reason, keeps nothing of it, and its daemon goes on.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use holdfast_bench::cluster::{Cluster, ClusterSpec};
use holdfast_sys::process::files::image::Table;
use holdfast_sys::process::files::{Changes, Image};
use holdfast_sys::process::image::{
    Action, Backing, BackingFile, Checked, Content, Credentials, Descriptors, Files, Frozen,
    FrozenProcess, FrozenThread, Limit, Mapping, Pages, Process, Run, Space, Tree, encode,
};
use holdfast_sys::process::rights::Identity;
use holdfast_sys::process::sockets::SocketState;
use holdfast_wire::migration::{MoveFrame, Offer, SocketStrategy};
use holdfast_wire::{Frame, MoveId};
use sha2::{Digest, Sha256};
use toml::Value;

use crate::common::member::Member;
use crate::faults::{ACCEPTOR, DONOR};
use crate::world::World;

/// User and group ID of nobody.
const NOBODY: u32 = 65534;
/// PID of the offered process.
const PID: i32 = 4242;
/// Address of the offered process's memory.
const HEAP: u64 = 0x7f00_0000_0000;
/// Address of the restorer's own code.
const STUB: u64 = 0x1_4000_0000;

/// Message numbers, as the daemon defines them.
const TREE: u8 = 1;
const PAGES: u8 = 2;
const FROZEN: u8 = 3;
const DESCRIPTORS: u8 = 4;
const LAST_DESCRIPTORS: u8 = 5;
const LAST_SOCKETS: u8 = 7;
const FREEZING: u8 = 11;
const OUTLOOK: u8 = 15;

type Message = (u8, Vec<u8>);

/// The expected part of the acceptor's refusal, and the donor's messages.
type Attack = (&'static str, Vec<Message>);

/// Runs all attacks, one after the other.
pub fn refused() -> Result<()> {
    let folder = tempfile::tempdir()?;
    std::fs::set_permissions(
        folder.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )?;
    let program = folder.path().join("server");
    std::fs::write(&program, "no program, but a file that is there")?;
    let mut spec = ClusterSpec::new(format!("m-false-{}", std::process::id()));
    spec.migration = true;
    let numbers = || Value::Array(vec![i64::from(NOBODY).into()]);
    let tests = env!("CARGO_TARGET_TMPDIR");
    let paths = [&folder.path().display().to_string(), tests].map(Value::from);
    for (key, value) in [
        ("users", numbers()),
        ("groups", numbers()),
        ("paths", Value::Array(paths.into())),
        ("files", Value::Array(vec![tests.into()])),
    ] {
        spec.migration_policy.insert(key.to_owned(), value);
    }
    let world = World {
        cluster: Cluster::up(spec)?,
    };
    let daemon = world.cluster.daemon_pid(ACCEPTOR)?;
    let mut member = Member::take_over(&world.cluster, (DONOR, 2), &[ACCEPTOR])?;
    for (why, messages) in attacks(&program)? {
        let said = attacked(&mut member, &program, &messages).with_context(|| why)?;
        eprintln!("{said}");
        ensure!(said.contains(why), "`{why}` is not in: {said}");
        world.wait("a restorer is left", || {
            Ok(world.restorers(ACCEPTOR)?.is_empty())
        })?;
        world.wait("a process of nobody's is left", || {
            let mut of_nobody = world.cluster.lab().processes(ACCEPTOR)?;
            of_nobody.retain(|pid| {
                let status = std::fs::read_to_string(format!("/proc/{pid}/status"));
                status.is_ok_and(|status| status.contains(&format!("Uid:\t{NOBODY}")))
            });
            Ok(of_nobody.is_empty())
        })?;
    }
    ensure!(world.cluster.daemon_pid(ACCEPTOR)? == daemon, "it has died");
    // A process of an honest node is still accepted.
    let as_nobody = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
    ];
    let counter = world.start_by("n1", &[&["env", "-C", "/tmp"], &as_nobody[..]].concat())?;
    world.move_to(world.pid_on("n1", &counter)?, "n1", ACCEPTOR)?;
    world.goes_on(&counter, ACCEPTOR)
}

/// Offers the process, sends these messages, and returns the reason with which the acceptor refuses.
fn attacked(member: &mut Member, program: &Path, messages: &[Message]) -> Result<String> {
    let id = member.new_move();
    member.say_of(id, MoveFrame::Offer(offer(program)?))?;
    let of = |wanted: MoveId, frame| match frame {
        Frame::Move { id, frame } if id == wanted => Some(frame),
        _ => None,
    };
    let refusals = member.hear("an answer to the offer", |frame| match of(id, frame)? {
        MoveFrame::Offered { refusals } => Some(refusals),
        _ => None,
    })?;
    ensure!(refusals.is_empty(), "the offer was refused: {refusals:?}");
    for (kind, bytes) in messages {
        let piece = MoveFrame::Piece {
            kind: *kind,
            more: false,
            bytes: bytes.clone().into(),
        };
        member.say_of(id, piece)?;
    }
    let mut taken = 0;
    let said = member.hear("an answer to its messages", |frame| match of(id, frame)? {
        MoveFrame::Took {
            problem: Some(why), ..
        } => Some(why),
        MoveFrame::Judged { refusals } if !refusals.is_empty() => Some(refusals.join("; ")),
        MoveFrame::Done { result, .. } => Some(format!("{result:?}")),
        MoveFrame::Took { .. } => {
            taken += 1;
            (taken == messages.len()).then(|| "all was taken".to_owned())
        }
        _ => None,
    })?;
    let reason = "it was an attack".to_owned();
    member.say_of(id, MoveFrame::Abort { reason })?;
    Ok(said)
}

fn attacks(program: &Path) -> Result<Vec<Attack>> {
    let tree = || tree(program);
    let first = |tree: &Tree| -> Result<Vec<Message>> {
        Ok(vec![
            message(TREE, tree)?,
            message(DESCRIPTORS, &descriptors())?,
            message(OUTLOOK, &frozen())?,
        ])
    };
    let over = |start| -> Result<Message> {
        let runs = vec![Run {
            space: Space::Process(0),
            start,
            length: 4096,
            content: Content::Bytes,
        }];
        let bytes = vec![0xcc; 4096];
        let (front, content) = Pages { runs, bytes }.into_message()?;
        Ok((PAGES, [front, content].concat()))
    };
    let changed = |change: &dyn Fn(&mut FrozenProcess)| {
        let mut frozen = frozen();
        frozen.processes.iter_mut().flatten().for_each(change);
        frozen
    };
    let filtered = changed(&|process| process.threads[0].filters = vec![vec![0; 8].into()]);
    let realtime = changed(&|process| {
        let scheduling = &mut process.threads[0].scheduling;
        (scheduling.policy, scheduling.priority) = (1, 99);
    });
    let secured = changed(&|process| process.threads[0].credentials.secure_bits = 5);
    let capable = changed(&|process| process.threads[0].credentials.capabilities[1] = 1 << 7);
    let mut of_root = tree()?;
    of_root.processes[0].credentials.uids = [0; 4];
    let mut of_another = tree()?;
    of_another.files[0].path = b"/bin/true".to_vec();
    // No clients of shared ports, and no reuseport programs.
    let nothing = BTreeMap::<u32, u8>::new();
    let no_states = BTreeMap::<u32, SocketState>::new();
    let no_states = postcard::to_stdvec(&(0u64, no_states, &nothing, &nothing))?;
    let stopped = [
        (FREEZING, Vec::new()),
        message(LAST_DESCRIPTORS, &last())?,
        (LAST_SOCKETS, no_states),
    ];
    let honest = first(&tree()?)?;
    let and = |rest: &[Message]| [&honest[..], rest].concat();
    Ok(vec![
        // A donor that declares less than it sends.
        ("user 0 is not in its list", first(&of_root)?),
        ("program /bin/true is not below", first(&of_another)?),
        // Pages outside the process's own memory.
        ("pages outside the mappings", and(&[over(STUB)?])),
        ("pages outside the mappings", and(&[over(HEAP + 4096)?])),
        // Messages out of order, or too many.
        ("is out of order", vec![over(HEAP)?]),
        ("is out of order", vec![message(FROZEN, &frozen())?]),
        ("is out of order", vec![honest[0].clone(), over(HEAP)?]),
        ("is out of order", and(&stopped[1..2])),
        (
            "is out of order",
            and(&[&stopped[..], &[message(TREE, &tree()?)?]].concat()),
        ),
        ("came too often", and(&honest[2..])),
        // State that only root may set, both in the forecast and after the freeze.
        (
            "seccomp filters without no_new_privs",
            vec![
                honest[0].clone(),
                honest[1].clone(),
                message(OUTLOOK, &filtered)?,
            ],
        ),
        (
            "seccomp filters without no_new_privs",
            and(&[&stopped[..], &[message(FROZEN, &filtered)?]].concat()),
        ),
        (
            "real-time priority 99",
            and(&[&stopped[..], &[message(FROZEN, &realtime)?]].concat()),
        ),
        (
            "it has securebits",
            and(&[&stopped[..], &[message(FROZEN, &secured)?]].concat()),
        ),
        (
            "it has capabilities",
            and(&[&stopped[..], &[message(FROZEN, &capable)?]].concat()),
        ),
    ])
}

fn message<T: Checked>(kind: u8, of: &T) -> Result<Message> {
    Ok((kind, encode(of)?))
}

/// Returns an offer with the description of an ordinary user's process, as the acceptor's daemon reads it.
fn offer(program: &Path) -> Result<Offer> {
    let identity = Identity {
        user: NOBODY,
        group: NOBODY,
        groups: Vec::new(),
    };
    let program = program.display().to_string();
    let description = (
        "server",
        BTreeSet::from([NOBODY]),
        BTreeSet::from([identity]),
        BTreeSet::from([program]),
        None::<u8>,
        Vec::<u8>::new(),
    );
    Ok(Offer {
        clone: false,
        sockets: SocketStrategy::Incremental,
        post_copy: false,
        hops: 0,
        memory: 1 << 20,
        flows: 0,
        description: postcard::to_stdvec(&description)?.into(),
    })
}

fn credentials() -> Credentials {
    Credentials {
        uids: [NOBODY; 4],
        gids: [NOBODY; 4],
        ..Credentials::default()
    }
}

fn tree(program: &Path) -> Result<Tree> {
    let content = std::fs::read(program)?;
    let heap = Mapping {
        start: HEAP,
        end: HEAP + 4096,
        protection: 3,
        advice: 0,
        backing: Backing::Anonymous(Vec::new()),
    };
    let process = Process {
        pid: PID,
        group: PID,
        session: PID,
        exit_signal: 17,
        threads: vec![PID],
        mappings: vec![heap],
        credentials: credentials(),
        directory: b"/".to_vec(),
        ..Process::default()
    };
    Ok(Tree {
        processes: vec![process],
        files: vec![BackingFile {
            path: program.display().to_string().into(),
            size: content.len() as u64,
            build_id: Vec::new(),
            digest: Sha256::digest(&content).to_vec(),
        }],
        ..Tree::default()
    })
}

fn descriptors() -> Descriptors {
    let table = Table {
        pids: [PID].into(),
        descriptors_max: (1024, 1024),
        ..Table::default()
    };
    Descriptors {
        files: Files::Image(Image {
            tables: [(0, table)].into(),
            ..Image::default()
        }),
        sockets: BTreeMap::new(),
        gone: BTreeSet::new(),
    }
}

fn last() -> Descriptors {
    Descriptors {
        files: Files::Changes(Changes::default()),
        sockets: BTreeMap::new(),
        gone: BTreeSet::new(),
    }
}

fn frozen() -> Frozen {
    let thread = FrozenThread {
        credentials: credentials(),
        ..FrozenThread::default()
    };
    Frozen {
        processes: vec![Some(FrozenProcess {
            threads: vec![thread],
            actions: vec![Action::default(); 64],
            limits: vec![Limit::default(); 16],
            directory: b"/".to_vec(),
            ..FrozenProcess::default()
        })],
    }
}
