//! A client of the control API over the daemon's Unix socket.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde::{Serialize, de::DeserializeOwned};
use tokio::net::UnixStream;

use super::{
    DropList, ErrorBody, FlowDetail, FlowList, FlowQuery, HandoffAccepted, HandoffList,
    HandoffRequest, HandoffState, HandoffStatus, NodeList, PeerList, Placement, PlacementRequest,
    PoolDetail, PoolList, PoolQuery, RegistrarStatus, Status,
};

mod migrations;
mod pool;
use crate::FlowText;

/// Why a request brought no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens there.
    #[error(
        "no daemon at {path}: {error} (is holdfastd running, and may this user open the socket?)"
    )]
    Absent {
        /// The socket's path.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// The connection broke, or what came was not HTTP.
    #[error("the daemon's answer broke off: {0}")]
    Transport(#[from] hyper::Error),
    /// The daemon refused.
    #[error("{body}")]
    Refused {
        /// The HTTP status.
        status: u16,
        /// What is wrong and what to do.
        body: ErrorBody,
    },
    /// The daemon answered something else: it may have another version.
    #[error("an answer that this version does not understand: {0}")]
    Form(#[from] serde_json::Error),
}

/// A client of the control API. Each request opens a connection of its own.
#[derive(Clone, Debug)]
pub struct Client {
    path: PathBuf,
}

/// The delays between looks at a handoff that goes on.
const POLL_FIRST: Duration = Duration::from_millis(1);
const POLL_LAST: Duration = Duration::from_millis(100);

/// Flows asked for at once where all are wanted: the daemon reads its whole table for each answer.
const FLOWS_AT_ONCE: u64 = 8192;

impl Client {
    /// A client of the daemon whose control socket is at `path`. Nothing is opened yet.
    pub fn new(path: impl AsRef<Path>) -> Self {
        Self {
            path: path.as_ref().to_owned(),
        }
    }

    /// `GET /v1/status`.
    ///
    /// # Errors
    /// See [`ClientError`], as with all requests.
    pub async fn status(&self) -> Result<Status, ClientError> {
        self.get("/v1/status").await
    }

    /// `GET /v1/flows`: one answer's worth.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn flows(&self, query: &FlowQuery) -> Result<FlowList, ClientError> {
        self.get(&format!("/v1/flows{}", query_text(query)?)).await
    }

    /// All flows that match, however many answers that takes.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn all_flows(&self, query: &FlowQuery) -> Result<FlowList, ClientError> {
        let mut query = query.clone();
        query.limit = query.limit.or(Some(FLOWS_AT_ONCE));
        let mut all = self.flows(&query).await?;
        while let Some(after) = all.next {
            query.after = Some(after);
            let more = self.flows(&query).await?;
            all.flows.extend(more.flows);
            all.next = more.next;
        }
        Ok(all)
    }

    /// `GET /v1/flows/{flow}`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn flow(&self, flow: &FlowText) -> Result<FlowDetail, ClientError> {
        self.get(&format!("/v1/flows/{}", percent(&flow.to_string())))
            .await
    }

    /// `POST /v1/handoffs`: begins one.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn hand_off(&self, request: &HandoffRequest) -> Result<HandoffAccepted, ClientError> {
        self.post("/v1/handoffs", request).await
    }

    /// `GET /v1/handoffs`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn handoffs(&self) -> Result<HandoffList, ClientError> {
        self.get("/v1/handoffs").await
    }

    /// `GET /v1/handoffs/{id}`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn handoff(&self, id: u64) -> Result<HandoffStatus, ClientError> {
        self.get(&format!("/v1/handoffs/{id}")).await
    }

    /// Waits until a handoff is finished; for a limit, wrap it in a timeout.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn wait_handoff(&self, id: u64) -> Result<HandoffStatus, ClientError> {
        let mut delay = POLL_FIRST;
        loop {
            let status = self.handoff(id).await?;
            if status.summary.state == HandoffState::Finished {
                return Ok(status);
            }
            tokio::time::sleep(delay).await;
            delay = (delay * 2).min(POLL_LAST);
        }
    }

    /// `GET /v1/nodes`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn nodes(&self) -> Result<NodeList, ClientError> {
        self.get("/v1/nodes").await
    }

    /// `GET /v1/drops`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn drops(&self) -> Result<DropList, ClientError> {
        self.get("/v1/drops").await
    }

    /// `GET /v1/placement`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn placement(&self) -> Result<Placement, ClientError> {
        self.get("/v1/placement").await
    }

    /// `POST /v1/placement`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn place(&self, request: &PlacementRequest) -> Result<Placement, ClientError> {
        self.post("/v1/placement", request).await
    }

    /// `GET /v1/registrar`, of a registrar.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn registrar(&self) -> Result<RegistrarStatus, ClientError> {
        self.get("/v1/registrar").await
    }

    /// `GET /v1/pools`, of a registrar: one answer's worth.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn pools(&self, query: &PoolQuery) -> Result<PoolList, ClientError> {
        self.get(&format!("/v1/pools{}", query_text(query)?)).await
    }

    /// All pools, however many answers that takes, ordered by their handles.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn all_pools(&self, query: &PoolQuery) -> Result<PoolList, ClientError> {
        let mut query = query.clone();
        let mut all = self.pools(&query).await?;
        while let Some(after) = all.next {
            query.after = Some(after);
            let more = self.pools(&query).await?;
            all.pools.extend(more.pools);
            (all.next, all.total) = (more.next, more.total);
        }
        all.pools.sort_unstable_by(|a, b| a.handle.cmp(&b.handle));
        Ok(all)
    }

    /// `GET /v1/pools/{handle}`, of a registrar.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn pool(&self, handle: &str) -> Result<PoolDetail, ClientError> {
        self.get(&format!("/v1/pools/{}", percent(handle))).await
    }

    /// `GET /v1/peers`, of a registrar.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn peers(&self) -> Result<PeerList, ClientError> {
        self.get("/v1/peers").await
    }

    /// `GET /metrics`: Prometheus' text.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn metrics(&self) -> Result<String, ClientError> {
        let bytes = self.request(Method::GET, "/metrics", Bytes::new()).await?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        Ok(serde_json::from_slice(
            &self.request(Method::GET, path, Bytes::new()).await?,
        )?)
    }

    async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        let body = Bytes::from(serde_json::to_vec(body)?);
        Ok(serde_json::from_slice(
            &self.request(Method::POST, path, body).await?,
        )?)
    }

    async fn request(&self, method: Method, path: &str, body: Bytes) -> Result<Bytes, ClientError> {
        let stream =
            UnixStream::connect(&self.path)
                .await
                .map_err(|error| ClientError::Absent {
                    path: self.path.clone(),
                    error,
                })?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // The connection ends with the sender; its error comes out of the request.
        let connection = tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "holdfast")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .expect("the client makes no invalid request");
        let response = sender.send_request(request).await?;
        let status = response.status();
        let bytes = response.into_body().collect().await?.to_bytes();
        connection.abort();
        if status.is_success() {
            Ok(bytes)
        } else {
            Err(refused(status, &bytes))
        }
    }
}

fn refused(status: StatusCode, bytes: &[u8]) -> ClientError {
    let body = serde_json::from_slice(bytes).unwrap_or_else(|_| ErrorBody {
        error: format!("{status}: {}", String::from_utf8_lossy(bytes)),
        what_to_do: "look into the daemon's log".into(),
    });
    ClientError::Refused {
        status: status.as_u16(),
        body,
    }
}

/// `?name=value&...` of a flat structure; absent fields are left out.
fn query_text(query: &impl Serialize) -> Result<String, serde_json::Error> {
    let value = serde_json::to_value(query)?;
    let parts: Vec<String> = value
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(_, value)| !value.is_null())
        .map(|(name, value)| match value.as_str() {
            Some(text) => format!("{name}={}", percent(text)),
            None => format!("{name}={}", percent(&value.to_string())),
        })
        .collect();
    Ok(if parts.is_empty() {
        String::new()
    } else {
        format!("?{}", parts.join("&"))
    })
}

/// Percent-encodes all but the unreserved characters of RFC 3986, section 2.3.
fn percent(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                char::from(byte).to_string()
            }
            _ => format!("%{byte:02X}"),
        })
        .collect()
}

/// The client for programs without an asynchronous runtime: runs one request of [`Client`] to its end.
#[derive(Debug)]
pub struct BlockingClient {
    client: Client,
    runtime: tokio::runtime::Runtime,
}

impl BlockingClient {
    /// As [`Client::new`].
    ///
    /// # Errors
    /// When the system gives no descriptors for a runtime.
    pub fn new(path: impl AsRef<Path>) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        Ok(Self {
            client: Client::new(path),
            runtime,
        })
    }

    /// Runs one request: `client.run(|c| c.status())`. Not from within an asynchronous runtime.
    pub fn run<'a, R, F: Future<Output = R>>(&'a self, request: impl FnOnce(&'a Client) -> F) -> R {
        self.runtime.block_on(request(&self.client))
    }
}

#[cfg(test)]
mod tests;
