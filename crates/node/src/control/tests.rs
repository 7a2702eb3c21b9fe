use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use holdfast_api::Drain;
use holdfast_api::control::{
    ClientError, ControlClient, FlowFilter, FlowSelection, ROUTES, ServiceChange, ServiceSource,
};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use super::*;

const FLOW: &str = "tcp:[fd00::1]:80-[fd00::2]:4242";

const CONFIG: &str = "[node]\nname = \"n1\"\nid = 1\naddress = \"10.0.0.1\"\ninterface = \"eth0\"\n\
                      run_dir = \"RUN\"\n[group]\nname = \"g\"\nreach = \"steer\"\ncontact = \"n1\"\n\
                      [tls]\nca = \"a\"\ncert = \"b\"\nkey = \"c\"\n";

fn config(dir: &Path) -> Config {
    let text = CONFIG.replace("RUN", dir.to_str().unwrap());
    Config::parse(Path::new("/holdfast.toml"), &text).unwrap()
}

fn refusal_body() -> ErrorBody {
    ErrorBody {
        error: "no".to_owned(),
        what_to_do: "something else".to_owned(),
    }
}

/// An engine that accepts handoffs and migrations to n2 (id 7), drops requests for handoffs to n3, and refuses requests
/// for a single item.
async fn engine(mut server: ControlServer) {
    loop {
        match server.recv().await {
            ControlRequest::Status(reply) => drop(reply.send(Ok(sample_status()))),
            ControlRequest::Flows(query, reply) => {
                let total = query.limit.unwrap_or(0);
                let next = query.after;
                let flows = Vec::new();
                let list = FlowList { flows, total, next };
                drop(reply.send(Ok(list)));
            }
            ControlRequest::Flow(_, reply) => drop(reply.send(Err(refusal_body()))),
            ControlRequest::StartHandoff(request, reply) => {
                let answer = match (request.to.as_str(), request.selection) {
                    ("n2", FlowSelection::Flows(flows)) => {
                        let flows = flows.len() as u64;
                        Ok(HandoffAccepted { id: 7, flows })
                    }
                    ("n3", _) => continue,
                    _ => Err(refusal_body()),
                };
                drop(reply.send(answer));
            }
            ControlRequest::Handoffs(reply) => drop(reply.send(Ok(HandoffList::default()))),
            ControlRequest::Handoff(_, reply) => drop(reply.send(Err(refusal_body()))),
            ControlRequest::Nodes(reply) => drop(reply.send(Ok(NodeList::default()))),
            ControlRequest::Load(reply) => drop(reply.send(Ok(NodeLoadStatus::default()))),
            ControlRequest::ReportLoad(request, uid, reply) => {
                assert_eq!(uid, Some(rustix::process::getuid().as_raw()));
                drop(reply.send(Ok(LoadReportEntry {
                    name: request.name,
                    pid: request.pid,
                    value: request.value,
                    full_at: request.full_at,
                    ends_in_s: request.for_s.unwrap_or(0),
                })));
            }
            ControlRequest::WithdrawLoad(_, uid, reply) => {
                assert_eq!(uid, Some(rustix::process::getuid().as_raw()));
                drop(reply.send(Ok(LoadWithdrawn { was_valid: true })));
            }
            ControlRequest::Drops(reply) => drop(reply.send(Ok(DropList::default()))),
            ControlRequest::Placement(reply) => drop(reply.send(Ok(PlacementWeights::default()))),
            ControlRequest::SetPlacement(request, uid, reply) => {
                assert_eq!(uid, Some(rustix::process::getuid().as_raw()));
                let (weights, epoch) = (request.weights, 2);
                drop(reply.send(Ok(PlacementWeights { weights, epoch })));
            }
            ControlRequest::Services(reply) => drop(reply.send(Ok(no_services()))),
            ControlRequest::ChangeServices(_, uid, reply) => {
                assert_eq!(uid, Some(rustix::process::getuid().as_raw()));
                drop(reply.send(Ok(ServiceChanged { version: 3 })));
            }
            ControlRequest::Replications(reply) => drop(reply.send(Ok(Default::default()))),
            ControlRequest::ChangeReplication(_, uid, reply) => {
                assert_eq!(uid, Some(rustix::process::getuid().as_raw()));
                let service = "web".to_owned();
                drop(reply.send(Ok(ReplicationAccepted { service })));
            }
            ControlRequest::Unit(_, reply) => drop(reply.send(Err(refusal_body()))),
            ControlRequest::Check(_, _, reply) => drop(reply.send(Err(refusal_body()))),
            ControlRequest::StartMigration(request, reply) => {
                let answer = match request.to.as_str() {
                    "n2" => Ok(MigrationAccepted { id: 7 }),
                    _ => Err(refusal_body()),
                };
                drop(reply.send(answer));
            }
            ControlRequest::NewToken(_, reply) => drop(reply.send(Ok(NewToken {
                token: "hf1-0".to_owned(),
                id: "00".to_owned(),
                expires_at_s: 1,
                address: "10.0.0.1:7401".to_owned(),
            }))),
            ControlRequest::Tokens(reply) => drop(reply.send(Ok(TokenList::default()))),
            ControlRequest::RevokeToken(_, reply) => drop(reply.send(Err(refusal_body()))),
            ControlRequest::Revocations(reply) | ControlRequest::PublishRevocations(_, reply) => {
                drop(reply.send(Ok(RevocationStatus::default())));
            }
            ControlRequest::Migrations(reply) => drop(reply.send(Ok(MigrationList::default()))),
            ControlRequest::Membership(
                OperatorRequest::Leave | OperatorRequest::ForceTakeover,
                reply,
            ) => drop(reply.send(Ok(holdfast_api::control::MembershipChange { epoch: 2 }))),
            ControlRequest::Drain(_, reply)
            | ControlRequest::DrainReport(reply)
            | ControlRequest::Undrain(reply) => drop(reply.send(Ok(DrainReport::default()))),
            ControlRequest::Balance(reply)
            | ControlRequest::SetBalancing(_, reply)
            | ControlRequest::Pin(_, reply) => {
                drop(reply.send(Ok(BalanceStatus::default())));
            }
            ControlRequest::BalanceNow(reply) | ControlRequest::BalancePlan(reply) => {
                drop(reply.send(Ok(BalancePlan::default())));
            }
            ControlRequest::BalanceLog(reply) => drop(reply.send(Ok(BalanceLog::default()))),
            refused => refused.refuse(refusal_body()),
        }
    }
}

fn no_services() -> ServiceList {
    ServiceList {
        source: ServiceSource::Group,
        version: 2,
        services: Vec::new(),
    }
}

fn sample_status() -> Status {
    serde_json::from_value(json!({
        "node": "n1", "node_id": 1, "group": "g", "version": "0", "uptime_s": 0, "reach": "steer",
        "contact_node": "n1", "services": [], "programs": [],
        "flows": {"owned": 1, "transit": 0, "moved": 0},
        "handoffs": {"donated": 0, "accepted": 0, "kept": 0},
        "peers_connected": 0, "peers_total": 2, "problems": []
    }))
    .unwrap()
}

struct Daemon {
    _dir: tempfile::TempDir,
    socket: PathBuf,
    metrics: Metrics,
    engine: JoinHandle<()>,
}

impl Daemon {
    fn start() -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        let metrics = Metrics::new();
        let server = ControlServer::bind(&config, metrics.clone()).unwrap();
        Daemon {
            socket: config.control_socket(),
            engine: tokio::spawn(engine(server)),
            metrics,
            _dir: dir,
        }
    }

    /// Returns status and body of the answer to a request written by hand.
    async fn raw(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let stream = UnixStream::connect(&self.socket).await.unwrap();
        raw(stream, method, path, body).await
    }
}

async fn raw<S>(mut stream: S, method: &str, path: &str, body: &str) -> (u16, String)
where
    S: AsyncReadExt + AsyncWriteExt + Unpin,
{
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    );
    stream.write_all((head + body).as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, body.to_owned())
}

fn expect_refusal(result: Result<impl std::fmt::Debug, ClientError>) -> (u16, ErrorBody) {
    match result {
        Err(ClientError::Refused { status, body }) => (status, body),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "current_thread")]
async fn client_returns_engine_answers() {
    let daemon = Daemon::start();
    let client = ControlClient::new(&daemon.socket);
    assert_eq!(client.status().await.unwrap(), sample_status());
    let flow: FlowText = FLOW.parse().unwrap();
    let query = FlowListQuery {
        limit: Some(9),
        after: Some(flow),
        ..FlowListQuery::default()
    };
    let list = client.flows(&query).await.unwrap();
    assert_eq!((list.total, list.next), (9, Some(flow)));
    assert_eq!(
        expect_refusal(client.flow(&flow).await),
        (404, refusal_body())
    );
    assert_eq!(
        expect_refusal(client.handoff(8).await),
        (404, refusal_body())
    );
    assert_eq!(client.nodes().await.unwrap(), NodeList::default());
    assert_eq!(client.drops().await.unwrap(), DropList::default());
    assert_eq!(client.handoffs().await.unwrap(), HandoffList::default());
    assert_eq!(
        client.placement().await.unwrap(),
        PlacementWeights::default()
    );
    let weights = [("n2".to_owned(), 3)].into();
    let placed = client
        .set_placement(&PlacementRequest { weights })
        .await
        .unwrap();
    assert_eq!((placed.epoch, placed.weights["n2"]), (2, 3));
    assert_eq!(client.load().await.unwrap(), NodeLoadStatus::default());
    let report = LoadReportRequest {
        name: "players".to_owned(),
        value: 37.0,
        full_at: Some(64.0),
        pid: Some(42),
        for_s: Some(60),
    };
    let kept = client.report_load(&report).await.unwrap();
    assert_eq!((kept.value, kept.pid, kept.ends_in_s), (37.0, Some(42), 60));
    let request = LoadWithdrawRequest {
        name: report.name,
        pid: report.pid,
    };
    let withdrawn = client.withdraw_load(&request).await.unwrap();
    assert!(withdrawn.was_valid);
    assert_eq!(client.services().await.unwrap(), no_services());
    let request = ServiceChangeRequest {
        id: Some(5),
        change: ServiceChange::Remove("web".to_owned()),
    };
    let changed = client.change_services(&request).await.unwrap();
    assert_eq!(changed.version, 3);
}

#[tokio::test(flavor = "current_thread")]
async fn handoffs_are_accepted_refused_or_cut_off() {
    let daemon = Daemon::start();
    let client = ControlClient::new(&daemon.socket);
    let mut request = HandoffRequest {
        selection: FlowSelection::Flows(vec![FLOW.parse().unwrap(); 20_000]),
        to: "n2".to_owned(),
        drain: Drain::None,
    };
    let accepted = client.hand_off(&request).await.unwrap();
    assert_eq!(
        accepted,
        HandoffAccepted {
            id: 7,
            flows: 20_000
        }
    );
    request.selection = FlowSelection::AllOf(FlowFilter::default());
    assert_eq!(
        expect_refusal(client.hand_off(&request).await),
        (409, refusal_body())
    );
    request.to = "n3".to_owned();
    let (status, body) = expect_refusal(client.hand_off(&request).await);
    assert_eq!(
        (status, body.error.as_str()),
        (503, "the daemon is stopping")
    );
}

#[tokio::test(flavor = "current_thread")]
async fn every_route_is_served_with_its_status() {
    let daemon = Daemon::start();
    for route in ROUTES {
        let path = route.path.replace("{flow}", FLOW);
        let path = path.replace("{id}", "7").replace("{pid}", "42");
        let body = match (route.method, route.path) {
            ("POST", "/v1/handoffs") => json!({"flows": [FLOW], "to": "n2"}).to_string(),
            ("POST", "/v1/migrations") => json!({"pid": 42, "to": "n2"}).to_string(),
            ("POST", "/v1/placement") => json!({"weights": {"n1": 1}}).to_string(),
            ("POST", "/v1/load/reports") => json!({"name": "players", "value": 3}).to_string(),
            ("POST", "/v1/load/withdraw") => json!({"name": "players"}).to_string(),
            ("POST", "/v1/tokens") => json!({}).to_string(),
            ("POST", "/v1/revocations") => json!({"list": ""}).to_string(),
            ("POST", "/v1/group/takeover") => json!({"force": true}).to_string(),
            ("POST", "/v1/drain" | "/v1/nodes/{name}/drain") => {
                json!({"deadline_s": 60}).to_string()
            }
            ("POST", "/v1/balance/pins") => json!({"pid": 42, "pinned": true}).to_string(),
            ("POST", "/v1/balance") => json!({"on": true}).to_string(),
            ("POST", "/v1/services") => json!({"change": {"remove": "web"}}).to_string(),
            ("POST", "/v1/replications") => json!({"stop": {"service": "web"}}).to_string(),
            _ => String::new(),
        };
        let (status, body) = daemon.raw(route.method, &path, &body).await;
        // The test engine refuses the routes with a name or number in the path.
        let expected = match route.path.contains('{') {
            true if route.path.contains("{name}") => 409,
            true => 404,
            false => route.status,
        };
        assert_eq!(status, expected, "{} {path}: {body}", route.method);
        if expected >= 400 {
            assert_eq!(
                serde_json::from_str::<ErrorBody>(&body).unwrap(),
                refusal_body()
            );
        }
    }
}

#[tokio::test(flavor = "current_thread")]
async fn bad_requests_get_a_remedy() {
    let daemon = Daemon::start();
    for (method, path, body, status, text) in [
        ("GET", "/v1/nothing", "", 404, "no such path"),
        ("DELETE", "/v1/status", "", 405, "no such method"),
        ("GET", "/v1/flows/tcp:nonsense", "", 400, "tcp:nonsense"),
        ("GET", "/v1/flows?limit=many", "", 400, "limit"),
        (
            "GET",
            "/v1/handoffs/seven",
            "",
            400,
            "`seven` is not the number",
        ),
        ("POST", "/v1/handoffs", "{", 400, "the body"),
        ("POST", "/v1/handoffs", "{\"to\": \"n2\"}", 400, "the body"),
        ("POST", "/v1/placement", "{\"weight\": {}}", 400, "weight"),
        (
            "POST",
            "/v1/group/takeover",
            "{\"force\": false}",
            400,
            "force",
        ),
        ("POST", "/v1/services", "{\"change\": {}}", 400, "the body"),
        ("POST", "/v1/drain", "{\"deadline\": 5}", 400, "deadline"),
        ("POST", "/v1/balance", "{}", 400, "the body"),
    ] {
        let (got, answer) = daemon.raw(method, path, body).await;
        assert_eq!(got, status, "{method} {path}: {answer}");
        let answer: ErrorBody = serde_json::from_str(&answer).unwrap();
        assert!(answer.error.contains(text), "{method} {path}: {answer}");
        assert!(answer.what_to_do.contains("/openapi.json"), "{answer}");
    }
    let long = "x".repeat(17 << 20);
    let stream = UnixStream::connect(&daemon.socket).await.unwrap();
    let (mut read, mut write) = stream.into_split();
    let head = format!(
        "POST /v1/handoffs HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n",
        long.len()
    );
    write.write_all(head.as_bytes()).await.unwrap();
    // The server may answer and close before the whole body has arrived.
    let sending = tokio::spawn(async move { write.write_all(long.as_bytes()).await });
    let mut status = [0; 12];
    read.read_exact(&mut status).await.unwrap();
    assert_eq!(&status, b"HTTP/1.1 413");
    sending.abort();
}

#[tokio::test(flavor = "current_thread")]
async fn description_and_metrics_are_served() {
    let daemon = Daemon::start();
    let (_, description) = daemon.raw("GET", "/openapi.json", "").await;
    let description: Value = serde_json::from_str(&description).unwrap();
    assert_eq!(description, holdfast_api::control::openapi(ROUTES));
    daemon
        .metrics
        .count_handoff(crate::metrics::CountedHandoff::Moved);
    let text = ControlClient::new(&daemon.socket).metrics().await.unwrap();
    assert!(
        text.contains("holdfast_handoffs_total{outcome=\"moved\"} 1"),
        "{text}"
    );
}

#[tokio::test(flavor = "current_thread")]
async fn tcp_listener_serves_only_metrics() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    // An address that only this process uses.
    let [high, low] = (std::process::id() as u16 | 0x0100).to_be_bytes();
    let address = SocketAddr::from(([127, high, low, 9], 9400));
    let occupied = std::net::TcpListener::bind(address).unwrap();
    config.metrics_listen = Some(address);
    let second_bind = ControlServer::bind(&config, Metrics::new()).err().unwrap();
    assert!(
        second_bind.to_string().contains("[metrics] listen"),
        "{second_bind}"
    );
    drop(occupied);
    let _server = ControlServer::bind(&config, Metrics::new()).unwrap();
    for (path, expected) in [("/metrics", 200), ("/v1/status", 404)] {
        let stream = TcpStream::connect(address).await.unwrap();
        let (status, _) = raw(stream, "GET", path, "").await;
        assert_eq!(status, expected, "{path}");
    }
}

#[tokio::test(flavor = "current_thread")]
async fn the_socket_is_private_and_has_one_owner() {
    let daemon = Daemon::start();
    let mode = std::fs::metadata(&daemon.socket)
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    let config = config(daemon.socket.parent().unwrap());
    let second = ControlServer::bind(&config, Metrics::new()).err().unwrap();
    assert_eq!(second.kind(), io::ErrorKind::AddrInUse);
    daemon.engine.abort();
    let _ = daemon.engine.await;
    assert!(!daemon.socket.exists());
}
