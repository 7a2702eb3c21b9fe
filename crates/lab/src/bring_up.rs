//! Brings a lab up.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::ErrorKind,
    net::{IpAddr, UdpSocket},
    path::{Path, PathBuf},
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use crate::{
    address_plan::{AddressPlan, HostKind, LAB_NUMBER_MAX, LabHost, SWITCH_NAME},
    cgroup,
    error::{Error, ErrorContext, Result},
    host_init::InitTask,
    lab_spec::{LabSpec, validate_name},
    lab_state::{self, LabLock, LabState},
    link::{LinkConfig, LinkTask, SplicedLink},
    namespace::{ProcessRef, StartNamespaces, run_program, start_role},
    network_scripts, processor_limit, receive_packet_steering,
};

/// Maximum time for a newly connected host to reach its router.
const ROUTER_TIMEOUT: Duration = Duration::from_secs(30);

/// A lab that is up, and its processes.
pub(crate) struct StartedLab {
    pub state: LabState,
    pub children: Vec<Child>,
}

/// Brings a lab up. First removes the remains of a killed process's lab of the same name; on failure removes everything
/// again.
pub(crate) fn up(spec: &LabSpec) -> Result<StartedLab> {
    validate_name(&spec.name)?;
    // Check the request before changing anything.
    let unnumbered_plan = AddressPlan::new(0, spec.nodes, spec.clients, spec.segments)?;
    spec.topology.resolve(&unnumbered_plan.hosts())?;
    spec.processors.map_or(Ok(()), processor_limit::validate)?;
    let program = spec.find_program()?;
    let base = cgroup::labs_cgroup()?;
    if !nix::unistd::geteuid().is_root() {
        return Err(Error::Machine(
            "a lab needs root: it makes network namespaces and mounts".into(),
        ));
    }
    let _lock = LabLock::lock_new_with_timeout(&spec.name)?;
    let all = LabLock::lock_root()?;
    remove_remains(&spec.name)?;
    let mut children = Vec::new();
    let group = base.join(&spec.name);
    let started =
        create_state(spec, unnumbered_plan, program, group.clone()).and_then(|mut state| {
            drop(all);
            start_hosts(&mut state, &mut children).map(|()| state)
        });
    match started {
        Ok(state) => Ok(StartedLab { state, children }),
        Err(error) => {
            // Report the first error; `prune` later removes anything that cannot be removed here.
            let _ = remove_all(&spec.name, &group, &mut children);
            Err(error)
        }
    }
}

/// Chooses a number and stores the state of the planned lab.
fn create_state(
    spec: &LabSpec,
    unnumbered_plan: AddressPlan,
    program: PathBuf,
    group: PathBuf,
) -> Result<LabState> {
    let number = choose_lab_number(&spec.name)?;
    let plan = AddressPlan {
        number,
        ..unnumbered_plan
    };
    let state = LabState {
        name: spec.name.clone(),
        plan,
        reach: spec.reach,
        keep: spec.keep,
        owner: ProcessRef::current()?,
        program,
        cgroup: group,
        processors: spec.processors,
        processor_groups: BTreeMap::new(),
        inits: BTreeMap::new(),
        links: spec.topology.resolve(&plan.hosts())?,
        link_program: None,
        cut: BTreeSet::new(),
        cut_between: BTreeSet::new(),
        ready: false,
    };
    state.save()?;
    Ok(state)
}

/// Kills and removes everything that belongs to a lab.
pub(crate) fn remove_all(name: &str, group: &Path, children: &mut Vec<Child>) -> Result<()> {
    cgroup::destroy(group)?;
    for child in children.iter_mut() {
        // The child was killed with its group; waiting prevents a zombie.
        let _ = child.wait();
    }
    children.clear();
    processor_limit::remove(name)?;
    lab_state::remove_lab_files(name)?;
    cgroup::remove_base_if_empty();
    Ok(())
}

/// Refuses if the lab is up; otherwise removes the remains of a dead one, except for its directory, which is locked.
fn remove_remains(name: &str) -> Result<()> {
    match LabState::load(name) {
        Ok(state) if state.is_alive() => return Err(Error::Exists(name.into())),
        _ => {
            cgroup::destroy(&cgroup::labs_cgroup()?.join(name))?;
            processor_limit::remove(name)?;
        }
    }
    let directory = lab_state::lab_directory(name);
    for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
        let path = entry.path();
        fs::remove_file(&path).context(|| format!("remove {}", path.display()))?;
    }
    Ok(())
}

fn choose_lab_number(own: &str) -> Result<u16> {
    let others = lab_state::lab_names()
        .into_iter()
        .filter(|name| name != own);
    let taken: BTreeSet<u16> = others
        .filter_map(|name| LabState::load(&name).ok())
        .map(|s| s.plan.number)
        .collect();
    (0..=LAB_NUMBER_MAX)
        .find(|number| !taken.contains(number))
        .ok_or_else(|| {
            Error::Machine("too many labs are up; take one down with `holdfast lab down`".into())
        })
}

fn start_hosts(state: &mut LabState, children: &mut Vec<Child>) -> Result<()> {
    let hosts: Vec<_> = state
        .plan
        .hosts()
        .into_iter()
        .map(|host| (host.clone(), state.is_spliced(&host.name)))
        .collect();
    cgroup::create(&state.cgroup)?;
    limit_processors(state)?;
    let switch = start_init(state, SWITCH_NAME, network_scripts::switch_settings(), None)?;
    record_init(state, children, SWITCH_NAME, switch)?;
    let started = for_each_host(&hosts, |(host, _)| {
        start_init(
            state,
            &host.name,
            network_scripts::host_settings(),
            Some(state.host_init(SWITCH_NAME)?),
        )
    });
    // Record the processes that did start before reporting the first failure.
    let started: Vec<_> = hosts
        .iter()
        .zip(started)
        .map(|((host, _), child)| record_init(state, children, &host.name, child?))
        .collect();
    started.into_iter().collect::<Result<()>>()?;
    let switch = state.host_init(SWITCH_NAME)?.clone();
    switch.run_in_net_namespace(|| wire_switch(state, &hosts))?;
    for_each_host(&hosts, |(host, spliced)| {
        state
            .host_init(&host.name)?
            .run_in_net_namespace(|| wire_host(state, host, *spliced))
    })
    .into_iter()
    .collect::<Result<()>>()?;
    receive_packet_steering::enable_receive_packet_steering(state)?;
    if hosts.iter().any(|(_, spliced)| *spliced) {
        let child = start_link_program(state, &hosts, &switch)?;
        state.link_program = Some(ProcessRef::from_pid(child.id())?);
        children.push(child);
    }
    for_each_host(&hosts, |(host, spliced)| {
        // Probing a lossy link would be slow and would consume a part of its sequence of losses.
        if *spliced {
            Ok(())
        } else {
            state
                .host_init(&host.name)?
                .run_in_net_namespace(|| wait_for_router(&state.plan, host))
        }
    })
    .into_iter()
    .collect::<Result<()>>()?;
    state.ready = true;
    state.save()?;
    if state.keep {
        children.iter_mut().for_each(|child| child.stdin = None);
    }
    Ok(())
}

/// Gives each node its share of the processors. The state is stored before, so that a lab that is being brought up can be
/// removed.
fn limit_processors(state: &mut LabState) -> Result<()> {
    for host in state.plan.hosts() {
        limit_host_processors(state, &host)?;
    }
    state.save()
}

/// Gives a node its share of the processors, if the lab limits them.
fn limit_host_processors(state: &mut LabState, host: &LabHost) -> Result<()> {
    let Some(processors) = state.processors.filter(|_| host.kind == HostKind::Node) else {
        return Ok(());
    };
    let group = state.host_cgroup(&host.name);
    fs::create_dir_all(&group).context(|| format!("create {}", group.display()))?;
    let names = (&*state.name, &*host.name);
    if let Some(limited) = processor_limit::limit(&group, names, (processors, state.plan.nodes))? {
        state.processor_groups.insert(host.name.clone(), limited);
    }
    Ok(())
}

/// Works on all hosts concurrently, one thread per host.
fn for_each_host<T: Send>(
    hosts: &[(LabHost, bool)],
    work: impl Fn(&(LabHost, bool)) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let work = &work;
    thread::scope(|scope| {
        let threads: Vec<_> = hosts
            .iter()
            .map(|host| scope.spawn(move || work(host)))
            .collect();
        let join = |thread: thread::ScopedJoinHandle<'_, Result<T>>| {
            thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    })
}

fn start_init(
    state: &LabState,
    host: &str,
    settings: Vec<(String, String)>,
    defaults: Option<&ProcessRef>,
) -> Result<Child> {
    let group = state.host_cgroup(host);
    fs::create_dir_all(&group).context(|| format!("create {}", group.display()))?;
    let task = InitTask {
        hostname: host.into(),
        cgroup: group,
        processor_group: state.processor_groups.get(host).cloned(),
        settings,
        keep: state.keep,
    };
    let mut command = Command::new(&state.program);
    command.args(["lab-init", &state.name, host]);
    let log = lab_state::lab_directory(&state.name).join(format!("{host}.log"));
    start_role(command, &task, &log, &StartNamespaces::Unshared(defaults))
}

fn record_init(
    state: &mut LabState,
    children: &mut Vec<Child>,
    host: &str,
    child: Child,
) -> Result<()> {
    let identity = ProcessRef::from_pid(child.id());
    children.push(child);
    state.inits.insert(host.into(), identity?);
    Ok(())
}

/// Sets up the switch. Runs in the switch's network namespace.
fn wire_switch(state: &LabState, hosts: &[(LabHost, bool)]) -> Result<()> {
    run_program(
        "ip",
        &["-batch", "-"],
        &network_scripts::bridge_script(&state.plan),
    )?;
    for segment in state.plan.all_segments() {
        let path = format!(
            "/proc/sys/net/ipv6/conf/{}/disable_ipv6",
            network_scripts::bridge_name(segment)
        );
        fs::write(&path, "0").context(|| format!("write {path}"))?;
    }
    run_program(
        "ip",
        &["-batch", "-"],
        &network_scripts::link_script(&state.plan, hosts, &state.inits),
    )?;
    for (host, spliced) in hosts {
        set_up_switch_end(state, host, *spliced)?;
    }
    route_service(&state.plan, &state.plan.hosts()[0])
}

/// Sets up the switch's end of a host's link. Runs in the switch's network namespace.
fn set_up_switch_end(state: &LabState, host: &LabHost, spliced: bool) -> Result<()> {
    set_features(
        &network_scripts::switch_end(host),
        &network_scripts::switch_end_features(),
    )?;
    if spliced {
        set_features(
            &network_scripts::bridge_port(host, true),
            &network_scripts::spliced_port_features(),
        )?;
    }
    if let Some(link) = state.kernel_link(&host.name) {
        enforce_rate(&network_scripts::switch_end(host), &link.down)?;
    }
    Ok(())
}

/// Cuts a host's power: its link goes down, so that no packet of a dying process leaves, and all its processes are killed,
/// with everything that exists only in the host's memory.
pub(crate) fn switch_off(
    state: &LabState,
    host: &LabHost,
    children: &mut Vec<Child>,
) -> Result<()> {
    let switch = state.host_init(SWITCH_NAME)?;
    let end = network_scripts::switch_end(host);
    // Each of these fails if the link is gone, as that of a host whose init process has ended.
    let change_link = |arguments: &[&str]| {
        switch.run_in_net_namespace(|| {
            let _ = run_program("ip", arguments, "");
            Ok(())
        })
    };
    change_link(&["link", "set", &end, "down"])?;
    cgroup::destroy(&state.host_cgroup(&host.name))?;
    let init = state.host_init(&host.name)?.pid;
    if let Some(position) = children.iter().position(|child| child.id() as i32 == init) {
        // The child was killed with its group; waiting prevents a zombie.
        let _ = children.swap_remove(position).wait();
    }
    // The kernel removes the link some time after the last process, and the name is needed again.
    change_link(&["link", "delete", &end])
}

/// Makes a host anew that [`switch_off`] has ended, with the same addresses and link.
pub(crate) fn switch_on(
    state: &mut LabState,
    host: &LabHost,
    children: &mut Vec<Child>,
) -> Result<()> {
    limit_host_processors(state, host)?;
    let switch = state.host_init(SWITCH_NAME)?.clone();
    let settings = network_scripts::host_settings();
    let init = start_init(state, &host.name, settings, Some(&switch))?;
    record_init(state, children, &host.name, init)?;
    switch.run_in_net_namespace(|| {
        let script = network_scripts::host_link_script(host, &state.inits);
        run_program("ip", &["-batch", "-"], &script)?;
        set_up_switch_end(state, host, false)
    })?;
    let init = state.host_init(&host.name)?;
    init.run_in_net_namespace(|| wire_host(state, host, false))?;
    receive_packet_steering::enable_receive_packet_steering(state)?;
    init.run_in_net_namespace(|| wait_for_router(&state.plan, host))
}

/// Sets up a host. Runs in the host's network namespace.
fn wire_host(state: &LabState, host: &LabHost, spliced: bool) -> Result<()> {
    set_features("eth0", &network_scripts::eth0_features(host, spliced))?;
    if let Some(link) = state.kernel_link(&host.name) {
        enforce_rate("eth0", &link.up)?;
    }
    let script = network_scripts::host_script(&state.plan, host);
    run_program("ip", &["-batch", "-"], &script)
}

/// Makes the kernel enforce the rate of packets that leave by an interface.
fn enforce_rate(interface: &str, link: &LinkConfig) -> Result<()> {
    let (packets, bucket) = network_scripts::rate_limit_commands(interface, link);
    run_program("ip", &["-batch", "-"], &packets)?;
    run_program("tc", &["-batch", "-"], &bucket)
}

fn set_features(interface: &str, features: &[&str]) -> Result<()> {
    let arguments: Vec<_> = ["-K", interface]
        .into_iter()
        .chain(features.iter().copied())
        .collect();
    run_program("ethtool", &arguments, "")
}

/// Routes packets for the routed service address to `host`. Runs in the switch's network namespace.
pub(crate) fn route_service(plan: &AddressPlan, host: &LabHost) -> Result<()> {
    let ((service4, service6), (v4, v6)) = (plan.routed_service_addresses(), (host.v4, host.v6));
    let script =
        format!("route replace {service4}/32 via {v4}\nroute replace {service6}/128 via {v6}\n");
    run_program("ip", &["-batch", "-"], &script)
}

fn start_link_program(
    state: &LabState,
    hosts: &[(LabHost, bool)],
    switch: &ProcessRef,
) -> Result<Child> {
    let spliced = hosts.iter().filter(|(_, spliced)| *spliced);
    let splices = spliced.filter_map(|(host, _)| {
        Some(SplicedLink {
            host: host.name.clone(),
            host_side: network_scripts::switch_end(host),
            switch_side: network_scripts::link_program_end(host),
            duplex: state.links.get(&host.name)?.clone(),
        })
    });
    let task = LinkTask {
        splices: splices.collect(),
        cgroup: state.host_cgroup(SWITCH_NAME),
        counters_path: state.counters_path(),
        keep: state.keep,
    };
    let log = lab_state::lab_directory(&state.name).join("link.log");
    // Use real-time priority, so that a busy machine does not distort delays; if that is not allowed, normal priority.
    let mut realtime = Command::new("chrt");
    realtime
        .args(["-f", "10"])
        .arg(&state.program)
        .args(["lab-link", &state.name]);
    start_role(realtime, &task, &log, &StartNamespaces::JoinNet(switch)).or_else(|_| {
        let mut unprioritized = Command::new(&state.program);
        unprioritized.args(["lab-link", &state.name]);
        start_role(
            unprioritized,
            &task,
            &log,
            &StartNamespaces::JoinNet(switch),
        )
    })
}

/// Waits until the router answers, in both families: a datagram to a closed port is answered with an error. Runs in the
/// host's network namespace.
fn wait_for_router(plan: &AddressPlan, host: &LabHost) -> Result<()> {
    let (router4, router6) = plan.router_addresses(host.segment);
    for router in [IpAddr::from(router4), IpAddr::from(router6)] {
        let deadline = Instant::now() + ROUTER_TIMEOUT;
        while !router_answers(router).context(|| format!("probe {router} from {}", host.name))? {
            if Instant::now() > deadline {
                return Err(Error::Machine(format!(
                    "{} does not reach its router {router}",
                    host.name
                )));
            }
        }
    }
    Ok(())
}

fn router_answers(router: IpAddr) -> std::io::Result<bool> {
    let unspecified: IpAddr = if router.is_ipv4() {
        [0u8; 4].into()
    } else {
        [0u8; 16].into()
    };
    let socket = UdpSocket::bind((unspecified, 0))?;
    socket.connect((router, 9))?;
    socket.set_read_timeout(Some(Duration::from_millis(50)))?;
    let sent = socket.send(b"?");
    let refused = |error: &std::io::Error| error.kind() == ErrorKind::ConnectionRefused;
    let answer = sent.and_then(|_| socket.recv(&mut [0; 1]));
    // Any other result, such as a missing route or silence, means: try again.
    Ok(answer.as_ref().is_err_and(refused))
}
