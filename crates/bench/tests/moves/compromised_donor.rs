//! A compromised donor offers an ordinary user's processes and sends messages that no honest donor sends. The acceptor
//! refuses each with its reason, keeps nothing of it, and its daemon goes on.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use holdfast_checkpoint::file_rights::UserIdentity;
use holdfast_checkpoint::files::image::DescriptorTable;
use holdfast_checkpoint::files::{FilesImage, FilesImageChanges};
use holdfast_checkpoint::image::{
    BackingFile, Credentials, DescriptorUpdate, MappingBacking, MemoryMapping, MemorySpace,
    OpenFilesUpdate, PageContent, PageRun, PagesMessage, ProcessLayout, ProcessState,
    ProcessTreeState, ResourceLimit, SignalAction, ThreadState, TreeLayout, Validate, encode,
};
use holdfast_checkpoint::sockets::SocketState;
use holdfast_testbed::cluster::{Cluster, ClusterSpec};
use holdfast_wire::failure::{self, PeerFault};
use holdfast_wire::move_frames::{MoveFrame, MoveOffer, SocketStrategy};
use holdfast_wire::{Frame, MoveId};
use sha2::{Digest, Sha256};
use toml::Value;

use crate::common::compromised_node::CompromisedNode;
use crate::faults::{ACCEPTOR, DONOR};
use crate::world::MigrationGroup;

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
pub fn refuse_all_attacks() -> Result<()> {
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
    let world = MigrationGroup {
        cluster: Cluster::up(spec)?,
    };
    let daemon = world.cluster.daemon_pid(ACCEPTOR)?;
    let mut member = CompromisedNode::take_over(&world.cluster, (DONOR, 2), &[ACCEPTOR])?;
    for (expected_reason, messages) in build_attacks(&program)? {
        let refusal = attack(&mut member, &program, &messages).with_context(|| expected_reason)?;
        eprintln!("{refusal}");
        ensure!(
            refusal.contains(expected_reason),
            "`{expected_reason}` is not in: {refusal}"
        );
        world.wait("a restorer process is left", || {
            Ok(world.restorers(ACCEPTOR)?.is_empty())
        })?;
        world.wait("a process of user `nobody` is left", || {
            let mut nobody_processes = world.cluster.lab().processes(ACCEPTOR)?;
            nobody_processes.retain(|pid| {
                let status = std::fs::read_to_string(format!("/proc/{pid}/status"));
                status.is_ok_and(|status| status.contains(&format!("Uid:\t{NOBODY}")))
            });
            Ok(nobody_processes.is_empty())
        })?;
    }
    ensure!(
        world.cluster.daemon_pid(ACCEPTOR)? == daemon,
        "the daemon of the acceptor died"
    );
    // A process of an honest node is still accepted.
    let as_nobody = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
    ];
    let counter = world.start_through("n1", &[&["env", "-C", "/tmp"], &as_nobody[..]].concat())?;
    world.move_to(world.pid_on("n1", &counter)?, "n1", ACCEPTOR)?;
    world.assert_goes_on(&counter, ACCEPTOR)
}

/// Offers the process, sends these messages, and returns the reason with which the acceptor refuses.
fn attack(member: &mut CompromisedNode, program: &Path, messages: &[Message]) -> Result<String> {
    let id = member.new_move();
    member.send_move_frame(id, MoveFrame::Offer(offer(program)?))?;
    let frame_of_move = |wanted: MoveId, frame| match frame {
        Frame::Move { id, frame } if id == wanted => Some(frame),
        _ => None,
    };
    let refusals = member.receive("an answer to the offer", |frame| {
        match frame_of_move(id, frame)? {
            MoveFrame::OfferResponse { refusals } => Some(refusals),
            _ => None,
        }
    })?;
    ensure!(refusals.is_empty(), "the offer was refused: {refusals:?}");
    for (kind, bytes) in messages {
        let piece = MoveFrame::Piece {
            kind: *kind,
            more: false,
            bytes: bytes.clone().into(),
        };
        member.send_move_frame(id, piece)?;
    }
    let mut processed_bytes = 0;
    let refusal = member.receive("an answer to its messages", |frame| {
        match frame_of_move(id, frame)? {
            MoveFrame::PiecesProcessed {
                problem: Some(why), ..
            } => Some(why.to_string()),
            MoveFrame::CheckResult { refusals } if !refusals.is_empty() => {
                Some(failure::join(&refusals))
            }
            MoveFrame::Done { result, .. } => Some(match result {
                Ok(_) => "the process runs".to_owned(),
                Err(why) => why.to_string(),
            }),
            MoveFrame::PiecesProcessed { .. } => {
                processed_bytes += 1;
                (processed_bytes == messages.len()).then(|| "all messages were accepted".to_owned())
            }
            _ => None,
        }
    })?;
    let reason = PeerFault::MoveGivenUp.into();
    member.send_move_frame(id, MoveFrame::Abort { reason })?;
    Ok(refusal)
}

fn build_attacks(program: &Path) -> Result<Vec<Attack>> {
    let tree = || tree(program);
    let first_messages = |tree: &TreeLayout| -> Result<Vec<Message>> {
        Ok(vec![
            encode_message(TREE, tree)?,
            encode_message(DESCRIPTORS, &descriptors())?,
            encode_message(OUTLOOK, &frozen())?,
        ])
    };
    let write_at = |start| -> Result<Message> {
        let runs = vec![PageRun {
            space: MemorySpace::Process(0),
            start,
            length: 4096,
            content: PageContent::Bytes,
        }];
        let bytes = vec![0xcc; 4096];
        let (front, content) = PagesMessage { runs, bytes }.into_message()?;
        Ok((PAGES, [front, content].concat()))
    };
    let changed_frozen = |change: &dyn Fn(&mut ProcessState)| {
        let mut frozen = frozen();
        frozen.processes.iter_mut().flatten().for_each(change);
        frozen
    };
    let with_filters =
        changed_frozen(&|process| process.threads[0].seccomp_filters = vec![vec![0; 8].into()]);
    let with_realtime = changed_frozen(&|process| {
        let scheduling = &mut process.threads[0].scheduling;
        (scheduling.policy, scheduling.priority) = (1, 99);
    });
    let with_secure_bits =
        changed_frozen(&|process| process.threads[0].credentials.secure_bits = 5);
    let with_capabilities =
        changed_frozen(&|process| process.threads[0].credentials.capabilities[1] = 1 << 7);
    let mut root_tree = tree()?;
    root_tree.processes[0].credentials.uids = [0; 4];
    let mut other_user_tree = tree()?;
    other_user_tree.files[0].path = b"/bin/true".to_vec();
    // No clients of shared ports, and no reuseport programs.
    let empty_map = BTreeMap::<u32, u8>::new();
    let no_states = BTreeMap::<u32, SocketState>::new();
    let no_states = postcard::to_stdvec(&(0u64, no_states, &empty_map, &empty_map))?;
    let stopped = [
        (FREEZING, Vec::new()),
        encode_message(LAST_DESCRIPTORS, &last_descriptors())?,
        (LAST_SOCKETS, no_states),
    ];
    let honest_messages = first_messages(&tree()?)?;
    let after_honest = |rest: &[Message]| [&honest_messages[..], rest].concat();
    let with_frozen = |frozen: &ProcessTreeState| -> Result<Vec<Message>> {
        Ok(after_honest(
            &[&stopped[..], &[encode_message(FROZEN, frozen)?]].concat(),
        ))
    };
    let outside = "pages outside the mappings";
    Ok(vec![
        // A donor that declares less than it sends.
        ("user 0 is not in its list", first_messages(&root_tree)?),
        (
            "program /bin/true is not below",
            first_messages(&other_user_tree)?,
        ),
        // Pages outside the process's own memory.
        (outside, after_honest(&[write_at(STUB)?])),
        (outside, after_honest(&[write_at(HEAP + 4096)?])),
        // Messages out of order, or too many.
        ("is out of order", vec![write_at(HEAP)?]),
        ("is out of order", vec![encode_message(FROZEN, &frozen())?]),
        (
            "is out of order",
            vec![honest_messages[0].clone(), write_at(HEAP)?],
        ),
        ("is out of order", after_honest(&stopped[1..2])),
        (
            "is out of order",
            after_honest(&[&stopped[..], &[encode_message(TREE, &tree()?)?]].concat()),
        ),
        ("came too often", after_honest(&honest_messages[2..])),
        // State that only root may set, both in the forecast and after the freeze.
        (
            "seccomp filters without no_new_privs",
            vec![
                honest_messages[0].clone(),
                honest_messages[1].clone(),
                encode_message(OUTLOOK, &with_filters)?,
            ],
        ),
        (
            "seccomp filters without no_new_privs",
            with_frozen(&with_filters)?,
        ),
        ("real-time priority 99", with_frozen(&with_realtime)?),
        ("it has securebits", with_frozen(&with_secure_bits)?),
        ("it has capabilities", with_frozen(&with_capabilities)?),
    ])
}

fn encode_message<T: Validate>(kind: u8, of: &T) -> Result<Message> {
    Ok((kind, encode(of)?))
}

/// Returns an offer with the description of an ordinary user's process, as the acceptor's daemon reads it.
fn offer(program: &Path) -> Result<MoveOffer> {
    let identity = UserIdentity {
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
    Ok(MoveOffer {
        clone: false,
        sockets: SocketStrategy::Incremental,
        post_copy: false,
        hops: 0,
        memory_bytes: 1 << 20,
        flow_count: 0,
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

fn tree(program: &Path) -> Result<TreeLayout> {
    let content = std::fs::read(program)?;
    let heap = MemoryMapping {
        start: HEAP,
        end: HEAP + 4096,
        protection: 3,
        advice: 0,
        backing: MappingBacking::Anonymous(Vec::new()),
    };
    let process = ProcessLayout {
        pid: PID,
        group: PID,
        session: PID,
        exit_signal: 17,
        threads: vec![PID],
        mappings: vec![heap],
        credentials: credentials(),
        directory: b"/".to_vec(),
        ..ProcessLayout::default()
    };
    Ok(TreeLayout {
        processes: vec![process],
        files: vec![BackingFile {
            path: program.display().to_string().into(),
            size: content.len() as u64,
            build_id: Vec::new(),
            digest: Sha256::digest(&content).to_vec(),
        }],
        ..TreeLayout::default()
    })
}

fn descriptors() -> DescriptorUpdate {
    let table = DescriptorTable {
        pids: [PID].into(),
        descriptors_max: (1024, 1024),
        ..DescriptorTable::default()
    };
    DescriptorUpdate {
        files: OpenFilesUpdate::Image(FilesImage {
            tables: [(0, table)].into(),
            ..FilesImage::default()
        }),
        sockets: BTreeMap::new(),
        removed: BTreeSet::new(),
    }
}

fn last_descriptors() -> DescriptorUpdate {
    DescriptorUpdate {
        files: OpenFilesUpdate::Changes(FilesImageChanges::default()),
        sockets: BTreeMap::new(),
        removed: BTreeSet::new(),
    }
}

fn frozen() -> ProcessTreeState {
    let thread = ThreadState {
        credentials: credentials(),
        ..ThreadState::default()
    };
    ProcessTreeState {
        processes: vec![Some(ProcessState {
            threads: vec![thread],
            signal_actions: vec![SignalAction::default(); 64],
            limits: vec![ResourceLimit::default(); 16],
            directory: b"/".to_vec(),
            ..ProcessState::default()
        })],
    }
}
