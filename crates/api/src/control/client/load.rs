//! Requests about load.

use super::{ClientError, ControlClient};
use crate::control::{
    LoadReportEntry, LoadReportRequest, LoadWithdrawRequest, LoadWithdrawn, NodeLoadStatus,
};

impl ControlClient {
    /// `GET /v1/load`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn load(&self) -> Result<NodeLoadStatus, ClientError> {
        self.get("/v1/load").await
    }

    /// `POST /v1/load/reports`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn report_load(
        &self,
        request: &LoadReportRequest,
    ) -> Result<LoadReportEntry, ClientError> {
        self.post("/v1/load/reports", request).await
    }

    /// `POST /v1/load/withdraw`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn withdraw_load(
        &self,
        request: &LoadWithdrawRequest,
    ) -> Result<LoadWithdrawn, ClientError> {
        self.post("/v1/load/withdraw", request).await
    }
}
